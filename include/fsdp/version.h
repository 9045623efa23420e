#pragma once

// The version of the headers, for #if. CMake and Python's package read it here.
#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

namespace fsdp {

/// The version of the library that the program runs with, such as "0.1.0". It differs from FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR and
/// FSDP_VERSION_PATCH only if the library was replaced after the program was built. A program works with all libraries of the same major
/// and minor version.
const char* version();

}  // namespace fsdp
