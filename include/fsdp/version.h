#pragma once

// The version of the headers, for #if. CMake and Python's package read it here.
#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

namespace fsdp {

/// The version of the library that the program runs with, such as "0.1.0". It is that of FSDP_VERSION_MAJOR and its neighbours, unless the
/// library was replaced after the program was built. Libraries of one major and minor version fit the same programs.
const char* version();

}  // namespace fsdp
