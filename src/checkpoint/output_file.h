#pragma once

#include <filesystem>
#include <string_view>

#include "checkpoint/files.h"

// What programs write to paths that users name. A rename would replace a link, a device or a FIFO at such a path by a regular file.
namespace fsdp::ckpt {

/// Returns the path to which links at `path` lead, without a slash at the end, whether or not anything exists there. Links of /proc stay,
/// because they lead to open files, not to names. Throws Error for links in a circle.
std::filesystem::path follow_links(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// Returns true for a path at which write_output() writes in place: a device, a FIFO, an open file such as /dev/stdout.
bool is_written_in_place(const std::filesystem::path& path);

/// Writes a file to a path that a user names, and follows links. A regular file is complete or not there: it is written beside the path
/// and renamed. Everything else is written in place; a descriptor of this process, such as /dev/stdout, from its position on. Throws Error.
void write_output(const std::filesystem::path& path, std::string_view text);

}  // namespace fsdp::ckpt
