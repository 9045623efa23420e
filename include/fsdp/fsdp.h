#pragma once

// All of libfsdp's C++ API.
#include "fsdp/activation_checkpoint.h"  // activation checkpointing
#include "fsdp/adamw_8bit.h"             // AdamW with 8-bit state
#include "fsdp/attend.h"                 // modules that not all ranks use
#include "fsdp/capture.h"                // a step as a graph of the device
#include "fsdp/deferred_init.h"          // models built without allocating memory
#include "fsdp/device_mesh.h"            // ranks, named mesh dimensions
#include "fsdp/error.h"                  // exceptions
#include "fsdp/forward.h"                // forward with the casts of mixed precision
#include "fsdp/fsdp_module.h"            // the handle of a sharded module
#include "fsdp/full_weights.h"           // unsharded weights, in buckets
#include "fsdp/fully_shard.h"            // sharding a module
#include "fsdp/gather_format.h"          // other formats of parameters in all-gathers
#include "fsdp/goodput.h"                // useful training time of a run with failures
#include "fsdp/grad_comm_format.h"       // gradients in 8 or 4 bits
#include "fsdp/grad_scaler.h"            // loss scaling for fp16
#include "fsdp/gradient_norm.h"          // norms of gradients, clipping by them
#include "fsdp/launch.h"                 // starting ranks on this machine
#include "fsdp/local_shards.h"           // this rank's shards by address
#include "fsdp/lr_schedule.h"            // learning-rate schedules
#include "fsdp/megatron_names.h"         // reading checkpoints of Megatron-FSDP
#include "fsdp/memory_budget.h"          // options chosen to fit into a memory budget
#include "fsdp/mixed_precision.h"        // dtypes of parameters and gradients
#include "fsdp/muon.h"                   // Muon for matrices, AdamW for the rest
#include "fsdp/offload.h"                // offload to host memory
#include "fsdp/optim.h"                  // optimizers on shards
#include "fsdp/placements.h"             // what is sharded
#include "fsdp/plan.h"                   // memory and communication of a training, computed in advance
#include "fsdp/replay_check.h"           // finding data that the hardware has corrupted
#include "fsdp/save_load.h"              // checkpoints
#include "fsdp/simulate.h"               // how long a planned step takes, on all ranks
#include "fsdp/size.h"                   // sizes in bytes, as "80GB"
#include "fsdp/stats.h"                  // memory and wire accounting
#include "fsdp/step_report.h"            // where the time of steps went
#include "fsdp/stop_requested.h"         // ending all ranks after Ctrl-C or SIGTERM
#include "fsdp/summon_full_params.h"     // temporary access to the full parameters
#include "fsdp/tie_parameters.h"         // one parameter under two names
#include "fsdp/timeline.h"               // a timeline of all ranks, as a page
#include "fsdp/transfer_plan.h"          // sending weights to ranks with another sharding
#include "fsdp/unit_info.h"              // the units of a model, as a table
#include "fsdp/version.h"                // the library's version
#include "fsdp/wait_reason.h"            // why a rank waited
