#include "checkpoint/safetensors_parts.h"

#include <algorithm>
#include <map>
#include <utility>

#include "checkpoint/json_events.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

constexpr const char* kPlaces = "DCP_SHARDING_INFO";
constexpr const char* kBegin = "saved_offsets";
// {"name": {"saved_offsets": [0]}}
constexpr std::size_t kPlacesDepth = 3;

class PlacesEvents final : public JsonEvents {
 public:
  explicit PlacesEvents(const std::string& file) : JsonEvents(file, kPlacesDepth) {}

  std::map<std::string, Shape> begins;  // by the tensor's name

 private:
  void on_begin(bool is_object) override {
    if (is_object != (depth() < 3)) fail(std::string("its ") + kPlaces + " has another form than {\"name\": {\"saved_offsets\": [0]}}");
    if (depth() == 3 && key_in(2) == kBegin) begins[key_in(1)].clear();
  }
  void on_value(Json value) override {
    if (depth() < 3 || key_in(2) != kBegin) return;
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX) {
      fail("tensor '" + shown(key_in(1)) + "': an offset is no natural number: " + shown(value.dump()));
    }
    begins[key_in(1)].push_back(value.get<std::int64_t>());
  }
  void on_end() override {}
};

}  // namespace

void place_boxes(SafetensorsHeader& header, const std::string& file) {
  const auto text = header.metadata.find(kPlaces);
  if (text == header.metadata.end()) return;
  PlacesEvents events(file);
  events.parse(text->second);
  for (SafetensorsTensor& tensor : header.tensors) {
    const auto found = events.begins.find(tensor.name);
    bool fits = found != events.begins.end() && found->second.size() == tensor.shape.size();
    for (std::size_t d = 0; fits && d < tensor.shape.size(); ++d) {
      std::int64_t end = 0;
      fits = !__builtin_add_overflow(found->second[d], tensor.shape[d], &end);
    }
    if (!fits) throw Error(file + ": tensor '" + shown(tensor.name) + "' has no " + kBegin + " that fit its shape");
    tensor.begin = std::move(found->second);
  }
}

std::vector<JoinedTensor> join_boxes(const std::vector<SafetensorsFile>& files) {
  std::vector<JoinedTensor> joined;
  std::map<std::string_view, std::size_t> places;
  for (const SafetensorsFile& file : files) {
    for (const SafetensorsTensor& part : file.tensors) {
      const auto [place, is_new] = places.emplace(part.name, joined.size());
      if (is_new) {
        joined.push_back({part.name, {part.dtype, Shape(part.shape.size()), {}}, part.unreadable});
      }
      JoinedTensor& whole = joined[place->second];
      DcpTensor& tensor = whole.tensor;
      if (tensor.dtype != part.dtype || tensor.shape.size() != part.shape.size() || whole.unreadable != part.unreadable) {
        throw Error(file.name + ": tensor '" + shown(part.name) + "' is no part of the one of this name in the files before");
      }
      Box box{part.begin.empty() ? Shape(part.shape.size()) : part.begin, part.shape};
      for (std::size_t d = 0; d < part.shape.size(); ++d) tensor.shape[d] = std::max(tensor.shape[d], box.offsets[d] + box.sizes[d]);
      tensor.chunks.push_back({std::move(box), {file.name, part.offset, part.length}});
    }
  }
  return joined;
}

}  // namespace fsdp::ckpt
