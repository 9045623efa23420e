// fsdp-ckpt: looks at checkpoints, checks, converts and compares them.

#include <c10/core/ScalarType.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "base/text.h"
#include "checkpoint/check.h"
#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/places.h"
#include "checkpoint/printable.h"
#include "checkpoint/records.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_parts.h"
#include "command_line.h"
#include "fsdp/error.h"
#include "fsdp/version.h"
#include "state/convert.h"
#include "state/diff.h"
#include "state/source.h"

namespace {

namespace fs = std::filesystem;
namespace ckpt = fsdp::ckpt;
using fsdp::bytes_text;
using fsdp::state::Source;
using fsdp::tools::kFound;

struct Options {
  std::string path;
  std::string other;
  fsdp::state::ConvertOptions convert;
  std::string dtype = "as stored";
  fsdp::state::DiffOptions diff;
};

std::string counted(std::int64_t count, const std::string& what) { return std::to_string(count) + " " + what + (count == 1 ? "" : "s"); }

std::string shape_text(const ckpt::Shape& shape) {
  std::string text = "[";
  for (std::size_t d = 0; d < shape.size(); ++d) text += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
  return text + "]";
}

/// Columns as wide as their widest entry; the last one is not padded. Entries may come from files.
void print_table(std::vector<std::vector<std::string>> rows) {
  for (auto& row : rows) {
    for (auto& entry : row) entry = ckpt::printable_line(entry);
  }
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += "  " + row[i];
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size(), ' ');
    }
    std::cout << line << "\n";
  }
}

void print_files(const fs::path& folder, const std::vector<std::string>& names) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& name : names) {
    std::error_code error;
    const auto size = fs::file_size(folder / name, error);
    rows.push_back({name, error ? "cannot be read: " + error.message() : bytes_text(static_cast<std::int64_t>(size))});
  }
  std::cout << counted(static_cast<std::int64_t>(rows.size()), "file") << "\n";
  print_table(rows);
}

void print_tensors(std::vector<std::vector<std::string>> rows, std::int64_t bytes) {
  std::cout << counted(static_cast<std::int64_t>(rows.size()), "tensor") << ", " << bytes_text(bytes) << "\n";
  print_table(std::move(rows));
}

std::vector<std::string> tensor_row(const std::string& name, const std::string& dtype, const ckpt::Shape& shape, std::size_t parts,
                                    std::int64_t bytes) {
  return {name, dtype, shape_text(shape), counted(static_cast<std::int64_t>(parts), "part"), bytes_text(bytes)};
}

std::string dtype_text(ckpt::Dtype dtype) { return std::string(ckpt::names_of(dtype).name); }

void inspect_dcp(const fs::path& folder) {
  const auto metadata =
      ckpt::read_dcp_metadata(ckpt::read_whole(folder / ckpt::kMetadataFile, ckpt::kMostMetadata), (folder / ckpt::kMetadataFile).string());
  const bool is_ours = fs::exists(folder / ckpt::kSidecar);
  std::cout << ckpt::printable(folder.string()) << ": torch.distributed.checkpoint, "
            << (!is_ours                    ? "without checksums (written by Python)"
                : ckpt::is_complete(folder) ? "complete"
                                            : "NOT COMPLETE")
            << "\n";
  print_files(folder, ckpt::list_folder(folder));
  std::vector<std::vector<std::string>> tensors;
  std::vector<std::vector<std::string>> values;
  std::int64_t total = 0;
  for (const auto& item : metadata.items) {
    if (const auto* tensor = std::get_if<ckpt::DcpTensor>(&item.content)) {
      const auto bytes = ckpt::numel(tensor->shape) * ckpt::itemsize(tensor->dtype);
      total += bytes;
      tensors.push_back(tensor_row(item.name, dtype_text(tensor->dtype), tensor->shape, tensor->chunks.size(), bytes));
      continue;
    }
    if (const auto* unreadable = std::get_if<ckpt::DcpUnreadable>(&item.content)) {
      values.push_back({item.name, "cannot be read: " + unreadable->why});
      continue;
    }
    const auto& record = std::get<ckpt::DcpObject>(item.content).record;
    try {
      const auto file = ckpt::File::open(folder / record.file);
      values.push_back({item.name, ckpt::repr(ckpt::read_object(file.reader(), record, item.name))});
    } catch (const fsdp::Error& error) {
      values.push_back({item.name, std::string("cannot be read: ") + error.what()});
    }
  }
  print_tensors(std::move(tensors), total);
  std::cout << counted(static_cast<std::int64_t>(values.size()), "value") << "\n";
  print_table(values);
}

void inspect_safetensors(const fs::path& path) {
  std::vector<std::vector<std::string>> tensors;
  std::vector<std::string> names;
  std::int64_t total = 0;
  const auto model = ckpt::read_safetensors(path);
  for (const auto& file : model) names.push_back(file.name);
  for (const auto& [name, tensor, unreadable] : ckpt::join_boxes(model)) {
    std::int64_t bytes = 0;
    for (const auto& part : tensor.chunks) bytes += part.record.length;
    total += bytes;
    tensors.push_back(tensor_row(name, unreadable.empty() ? dtype_text(tensor.dtype) : "cannot be read: " + unreadable, tensor.shape,
                                 tensor.chunks.size(), bytes));
  }
  std::cout << ckpt::printable(path.string()) << ": safetensors\n";
  print_files(fs::is_directory(path) ? path : path.parent_path(), names);
  print_tensors(std::move(tensors), total);
}

int inspect(const Options& options) {
  ckpt::require_checkpoint(options.path);
  ckpt::is_safetensors(options.path) ? inspect_safetensors(options.path) : inspect_dcp(options.path);
  return 0;
}

int verify(const Options& options) {
  const fs::path path = options.path;
  ckpt::require_checkpoint(path);
  ckpt::Findings findings;
  // Not by what its metadata say: they may be what is wrong.
  const bool is_safetensors = ckpt::is_safetensors(path);
  if (is_safetensors) {
    try {
      for (const auto& [name, tensor, unreadable] : ckpt::join_boxes(ckpt::read_safetensors(path))) {
        ++findings.tensors;
        if (!unreadable.empty()) findings.only_for_python.push_back("'" + name + "': " + unreadable);
        if (const auto fault = ckpt::fault_in_boxes(tensor); !fault.empty()) findings.faults.push_back("'" + name + "': " + fault);
      }
    } catch (const fsdp::Error& error) {
      findings.faults.emplace_back(error.what());
    }
  } else {
    findings = ckpt::check_dcp(path);
  }
  if (findings.faults.empty()) {
    std::cout << ckpt::printable(options.path) << ": whole: " << counted(findings.tensors, "tensor") << ", "
              << counted(findings.values, "value") << ", "
              << (findings.has_checksums
                      ? counted(findings.files, "checksum")
                      : (is_safetensors ? "no checksums: places and sizes were checked, not contents" : "by the records' own checksums"))
              << "\n";
    for (const auto& item : findings.only_for_python) {
      std::cout << (is_safetensors ? "  cannot be read: " : "  only Python can read ") << ckpt::printable_line(item) << "\n";
    }
    return 0;
  }
  std::cout << ckpt::printable(options.path) << ": " << counted(static_cast<std::int64_t>(findings.faults.size()), "fault") << "\n";
  for (const auto& fault : findings.faults) std::cout << "  " << ckpt::printable_line(fault) << "\n";
  return kFound;
}

int convert(Options options) {
  const std::map<std::string, at::ScalarType> dtypes = {{"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};
  if (const auto found = dtypes.find(options.dtype); found != dtypes.end()) options.convert.dtype = found->second;
  const auto done = fsdp::state::convert(options.path, options.other, options.convert);
  std::cout << ckpt::printable(options.other) << ": " << counted(done.tensors, "tensor") << ", " << bytes_text(done.bytes);
  if (done.left_out > 0) {
    std::cout << "; left out: " << counted(done.left_out, "item") << " that " << (done.left_out == 1 ? "is no tensor" : "are no tensors")
              << " below '" << options.convert.prefix << "'";
  }
  std::cout << "\n";
  for (const auto& item : done.unreadable) std::cout << "  cannot be read, and is left out: " << ckpt::printable_line(item) << "\n";
  return done.unreadable.empty() ? 0 : kFound;
}

int diff(const Options& options) {
  const auto found = fsdp::state::diff(options.path, options.other, options.diff);
  for (const auto& line : found.lines) std::cout << ckpt::printable_line(line) << "\n";
  std::cout << counted(static_cast<std::int64_t>(found.lines.size()), "difference") << ", " << found.same << " equal";
  if (found.ignored > 0) std::cout << ", " << found.ignored << " ignored";
  std::cout << "\n";
  return found.lines.empty() ? 0 : kFound;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Inspects, verifies, converts and compares checkpoints: folders of torch.distributed.checkpoint, and safetensors.",
               "fsdp-ckpt");
  app.require_subcommand(1);
  app.footer("Exit codes: 0 no fault or difference, 1 faults or differences were found, 2 wrong option or unreadable checkpoint.");
  app.set_version_flag("--version", fsdp::version());
  auto* inspecting = app.add_subcommand("inspect", "List files, tensors and values");
  inspecting->add_option("path", options.path, "A checkpoint")->required();
  auto* verifying = app.add_subcommand("verify", "Read the complete checkpoint, and list all faults: checksums, places, parts of tensors");
  verifying->add_option("path", options.path, "A checkpoint")->required();

  auto* converting = app.add_subcommand("convert", "Convert torch.distributed.checkpoint to safetensors, or the reverse, tensor by tensor");
  converting->add_option("from", options.path, "A checkpoint of one format")->required();
  converting->add_option("to", options.other, "A new folder, for the other format")->required();
  converting
      ->add_option("--prefix", options.convert.prefix,
                   "The prefix of the model's names in torch.distributed.checkpoint, which safetensors do not have")
      ->capture_default_str();
  converting
      ->add_option("--dtype", options.dtype, "The dtype of floating-point tensors in the new files; float4_e2m1fn_x2 is not converted")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  fsdp::tools::add_size(*converting, "--max-file-size", options.convert.most_bytes_per_file,
                        "The largest size of a file, as in 500MB; a tensor is not divided (default: 5GiB)");

  auto* comparing = app.add_subcommand("diff", "Compare names, shapes, dtypes and values, however the files are divided");
  comparing->add_option("a", options.path, "A checkpoint")->required();
  comparing->add_option("b", options.other, "Another one")->required();
  comparing->add_option("--ignore", options.diff.ignored, "Ignore names that begin with this; may be repeated")->allow_extra_args(false);

  return fsdp::tools::run_command(app, argc, argv, [&] {
    if (*inspecting) return inspect(options);
    if (*verifying) return verify(options);
    if (*converting) return convert(options);
    return diff(options);
  });
}
