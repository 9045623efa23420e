#include "fsdp/version.h"

#define FSDP_TEXT_OF(value) #value
#define FSDP_TEXT(value) FSDP_TEXT_OF(value)

const char* fsdp::version() { return FSDP_TEXT(FSDP_VERSION_MAJOR) "." FSDP_TEXT(FSDP_VERSION_MINOR) "." FSDP_TEXT(FSDP_VERSION_PATCH); }
