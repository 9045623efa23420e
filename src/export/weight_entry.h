#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/unit.h"
#include "export/assembly.h"
#include "layout/unit_layout.h"

namespace fsdp::weights {

/// Returns the size of a place for this many bytes in buffers.
inline std::int64_t aligned(std::int64_t bytes) { return (bytes + layout::kAlignment - 1) / layout::kAlignment * layout::kAlignment; }

/// Marks an entry as a part of a tensor's change: its positions, or its values, which are the next entry. Ranks have any number of them,
/// and a rank's pieces follow one another.
struct Changed {
  std::vector<std::int64_t> shape;  ///< Of the tensor.
  /// The numbers of elements in the unit's pieces; if a rank owns several pieces, the first of them has all. Empty if the tensor is not
  /// cut.
  std::vector<std::int64_t> numel_of_piece;
  std::vector<std::int64_t> numel_of_rank;  ///< The numbers of elements of the assembly's ranks; empty without an assembly.
  std::int64_t largest_numel = 0;           ///< The most that a rank receives.
  bool is_positions = false;
};

/// scale * up * down, a product of two thin matrices (an adapter, as LoRA has them), which is added to a tensor when that is packed.
struct Product {
  std::size_t up = 0;    ///< [rows, rank]: an index of Request::factors.
  std::size_t down = 0;  ///< [rank, columns]: the same.
  double scale = 1;
  bool transposed = false;  ///< The tensor is [columns, rows].
};

/// A tensor of a model's state, and this rank's part of it.
struct Entry {
  std::vector<std::string> names;      ///< Several if it is tied: it is then sent once.
  std::vector<std::int64_t> shape;     ///< Of the whole tensor.
  at::Tensor own;                      ///< With any strides, if `unit` is null.
  const engine::Unit* unit = nullptr;  ///< The tensor's unit. If it is null or has no shards, `own` is complete.
  std::size_t parameter = 0;           ///< Its index in the unit.
  std::int64_t cut = 0;                ///< The dimension that the unit cuts. Ranks have slices along it, each in row-major order.
  std::shared_ptr<const Assembly> assembly =
      {};  ///< Set if the tensor is cut over further dimensions of the mesh: the unit then cuts a piece.
  std::optional<Changed> changed = {};
  std::vector<Product> added = {};  ///< Not in `own`. The tensor has two dimensions then.
  bool as_is = false;               ///< It is never converted: its elements are codes, even if their dtype is one of numbers.
  /// The version counter of a tensor that wraps `own` (a DTensor), whose operators count there; without one, null.
  c10::VariableVersion wrapper = c10::VariableVersion(c10::VariableVersion::DISABLED);

  /// True if ranks of the unit have parts of it.
  bool is_cut_by_unit() const { return unit != nullptr && !unit->replicated_optimizer(); }
  /// True if ranks have parts of it.
  bool is_cut() const { return is_cut_by_unit() || assembly != nullptr; }
  /// The shape of the tensor or piece that the unit cuts.
  const std::vector<std::int64_t>& shape_in_unit() const { return assembly != nullptr ? assembly->shapes[assembly->rank()] : shape; }
  Cut cut_by_unit() const { return {.dim = cut, .ranks = is_cut_by_unit() ? unit->communicators.gather->size() : 1}; }
};

/// The dtype in which an entry is sent: floating-point numbers are converted to `dtype`, codes are not.
at::ScalarType travelling_dtype(const Entry& entry, std::optional<at::ScalarType> dtype);
/// True for dtypes of which an element is one floating-point number.
bool is_converted(at::ScalarType dtype);
/// Where the unit's pieces of an entry that it cuts begin, in elements; the last value is the number of all elements.
std::vector<std::int64_t> begins_by_rank(const Entry& entry);

}  // namespace fsdp::weights
