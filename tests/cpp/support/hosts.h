#pragma once

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "fsdp/error.h"

// Hosts without hosts: ranks find each other's memory only where the kernel's name of its present life is the same.
namespace fsdp::testing {

/// From now on this process reads another such name, the host's. False where the system refuses that.
inline bool is_on_host(int host) {
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  std::string path = "/tmp/fsdp-host-XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) return false;
  close(file);
  std::ofstream(path) << "00000000-0000-0000-0000-00000000000" << host << "\n";
  const bool mounted = mount(path.c_str(), "/proc/sys/kernel/random/boot_id", nullptr, MS_BIND, nullptr) == 0;
  std::remove(path.c_str());
  return mounted;
}

/// Whether a process of this test may do that.
inline bool can_pretend_hosts() {
  const pid_t child = fork();
  if (child == 0) _exit(is_on_host(1) ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return status == 0;
}

/// The ranks of each host are so many, one host's after the other's.
inline void pretend_hosts(int rank, int ranks_per_host) {
  if (!is_on_host(rank / ranks_per_host)) throw Error("this process may not pretend to be on another host");
}

}  // namespace fsdp::testing
