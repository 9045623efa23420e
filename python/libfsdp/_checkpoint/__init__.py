"""Checkpoints: this library's own, by the C++ library's code, in the format of torch.distributed.checkpoint."""
