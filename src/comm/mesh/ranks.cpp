#include "comm/mesh/ranks.h"

#include <ATen/ATen.h>

#include <cstring>
#include <exception>
#include <string_view>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

std::vector<std::shared_ptr<Communicator>> rows_of(const DeviceMesh& mesh) {
  std::vector<std::shared_ptr<Communicator>> rows;
  for (const auto& dim : mesh.dims()) rows.push_back(mesh.communicator(dim.name));
  return rows;
}

/// Packs a text behind its length, so that several can follow each other.
std::string packed(const std::string& text) {
  const auto length = static_cast<std::int64_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

std::vector<std::string> unpacked(std::string_view texts) {
  std::vector<std::string> all;
  while (!texts.empty()) {
    std::int64_t length = 0;
    std::memcpy(&length, texts.data(), sizeof(length));
    all.emplace_back(texts.substr(sizeof(length), static_cast<std::size_t>(length)));
    texts.remove_prefix(sizeof(length) + static_cast<std::size_t>(length));
  }
  return all;
}

}  // namespace

Ranks::Ranks(std::vector<std::shared_ptr<Communicator>> rows) : rows_(std::move(rows)) { std::erase(rows_, nullptr); }

Ranks::Ranks(const DeviceMesh& mesh) : Ranks(rows_of(mesh)) {}

std::int64_t Ranks::size() const {
  std::int64_t size = 1;
  for (const auto& row : rows_) size *= row->size();
  return size;
}

std::int64_t Ranks::index() const {
  std::int64_t index = 0;
  for (const auto& row : rows_) index = index * row->size() + row->rank();
  return index;
}

at::Tensor Ranks::exchange(const at::Tensor& values, const Label& label) const {
  auto all = values;
  for (auto row = rows_.rbegin(); row != rows_.rend(); ++row) all = (*row)->exchange(all.reshape({-1}), label);
  return all.reshape({size(), values.numel()});
}

// Goes through the dimensions from the outermost one. Afterwards the first rank of each row along the next dimension has the text.
std::string Ranks::broadcast(const std::string& text, const Label& label) const {
  auto known = index() == 0 ? text : std::string();
  for (const auto& row : rows_) known = row->broadcast(known, 0, label);
  return known;
}

std::vector<std::string> Ranks::gather(const std::string& text, const Label& label) const {
  auto texts = packed(text);
  for (auto row = rows_.rbegin(); row != rows_.rend(); ++row) texts = (*row)->gather(texts, label);
  return index() == 0 ? unpacked(texts) : std::vector<std::string>();
}

// Goes through the rows, each with the result of the rows before. This sends less than exchange().
void Ranks::unite(std::span<std::uint8_t> bits, const Label& label) const {
  const auto own = at::from_blob(bits.data(), {static_cast<std::int64_t>(bits.size())}, at::kByte);
  for (auto row = rows_.rbegin(); row != rows_.rend(); ++row) {
    const auto all = (*row)->exchange(own, label);
    const auto* bytes = all.const_data_ptr<std::uint8_t>();
    for (int rank = 0; rank < (*row)->size(); ++rank, bytes += bits.size()) {
      for (std::size_t i = 0; i < bits.size(); ++i) bits[i] |= bytes[i];
    }
  }
}

bool Ranks::agree(bool ok, const Label& label) const {
  std::uint8_t failed = ok ? 0 : 1;
  unite({&failed, 1}, label);
  return failed == 0;
}

// Goes through the dimensions. Differences that were found along one dimension are passed on to the next.
void Ranks::compare(std::string text, const Label& label) const {
  std::exception_ptr difference;
  for (auto row = rows_.rbegin(); row != rows_.rend(); ++row) {
    try {
      (*row)->expect_equal(text, label);
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      if (!difference) difference = std::current_exception();
      text = std::string("refused: ") + error.what();
    }
  }
  if (difference) std::rethrow_exception(difference);
}

}  // namespace fsdp::comm
