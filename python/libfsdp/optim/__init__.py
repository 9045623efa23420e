"""Optimizers whose step is one call of C++: for DTensors, as fully_shard leaves them, and for plain tensors."""

from libfsdp.optim._adamw_8bit import AdamW8bit
from libfsdp.optim._fused import SGD, Adam, AdamW
from libfsdp.optim._muon import Muon

__all__ = ["SGD", "Adam", "AdamW", "AdamW8bit", "Muon"]
