// For `make coverage`: a rank ends by _exit, which would lose its counters. Part of the library, since every shared object has counters of
// its own, and in front of the C library's function of that name.

#include <sys/syscall.h>
#include <unistd.h>

extern "C" void __gcov_dump();

extern "C" [[noreturn]] void _exit(int code) {
  __gcov_dump();
  syscall(SYS_exit_group, code);
  __builtin_unreachable();
}
