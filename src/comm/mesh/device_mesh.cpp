#include "fsdp/device_mesh.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "base/exception_text.h"
#include "base/text.h"
#include "comm/collectives/native_communicator.h"
#include "comm/collectives/pairwise_communicator.h"
#include "comm/collectives/shared_communicator.h"
#include "comm/host_memory/hosts.h"
#include "comm/launch/world.h"
#include "comm/mesh/device_mesh_state.h"
#include "comm/mesh/null_mesh.h"
#include "comm/mesh/ranks.h"
#include "comm/mesh/rendezvous.h"
#include "comm/mesh/store_mesh.h"
#include "comm/null_communicator.h"
#include "fsdp/error.h"

namespace fsdp {
namespace {

std::string describe(const std::vector<MeshDim>& dims) {
  const auto text = joined(dims, " x ", [](const MeshDim& dim) { return dim.name + "=" + std::to_string(dim.size); });
  return "{" + text + "}";
}

void check_names(const std::vector<MeshDim>& dims) {
  if (dims.empty()) throw Error("a mesh needs at least one dimension, such as {{\"dp_shard\", -1}}");
  std::set<std::string> names;
  for (const MeshDim& dim : dims) {
    if (dim.name.empty()) throw Error("mesh " + describe(dims) + ": a dimension has no name");
    if (!names.insert(dim.name).second) throw Error("mesh " + describe(dims) + ": two dimensions are named '" + dim.name + "'");
  }
}

// Replaces the size -1, and checks that the sizes multiply to the number of ranks.
void resolve_sizes(std::vector<MeshDim>& dims, std::int64_t world_size) {
  const std::string asked = describe(dims);
  MeshDim* inferred = nullptr;
  std::int64_t known = 1;
  for (MeshDim& dim : dims) {
    if (dim.size == -1 && inferred == nullptr) {
      inferred = &dim;
    } else if (dim.size == -1) {
      throw Error("mesh " + asked + ": only one size can be -1 (inferred)");
    } else if (dim.size < 1) {
      throw Error("mesh " + asked + ": the size of '" + dim.name + "' must be positive, or -1 to infer it");
    } else {
      known *= dim.size;
    }
  }
  if (inferred != nullptr && world_size % known == 0) {
    inferred->size = world_size / known;
  } else if (inferred != nullptr || known != world_size) {
    throw Error("mesh " + asked + " does not fit " + std::to_string(world_size) + (world_size == 1 ? " rank" : " ranks") +
                ": the sizes must multiply to the number of ranks that were launched");
  }
}

std::vector<std::int64_t> coordinates_of(std::int64_t rank, const std::vector<MeshDim>& dims) {
  std::vector<std::int64_t> coordinates(dims.size());
  for (std::size_t d = dims.size(); d-- > 0;) {
    coordinates[d] = rank % dims[d].size;
    rank /= dims[d].size;
  }
  return coordinates;
}

// The row through `rank` along dims[d].
comm::Row row_through(std::int64_t rank, const std::vector<MeshDim>& dims, std::size_t d) {
  std::int64_t stride = 1;
  std::int64_t world_size = 1;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    world_size *= dims[i].size;
    if (i > d) stride *= dims[i].size;
  }
  const std::int64_t position = rank / stride % dims[d].size;
  comm::Row row{.dim = dims[d].name, .rank = static_cast<int>(position), .global_ranks = {}, .world_size = world_size};
  for (std::int64_t k = 0; k < dims[d].size; ++k) row.global_ranks.push_back(rank + (k - position) * stride);
  return row;
}

// The part of a row around its own rank.
comm::Row neighbours_in(const comm::Row& row, std::int64_t neighbours) {
  const auto first = row.global_ranks.begin() + row.rank / neighbours * neighbours;
  return {.dim = row.dim,
          .rank = static_cast<int>(row.rank % neighbours),
          .global_ranks = {first, first + neighbours},
          .world_size = row.world_size,
          .progress = row.progress};
}

c10::Device local_device(const std::string& device_type, const comm::World& world, bool share_gpus) {
  if (device_type == "cpu") return c10::Device(c10::kCPU);
  const auto type = comm::device_type_of(device_type);
  if (!type && device_type == "cuda") {
    throw Error("device type \"cuda\" needs NCCL, which this build of libfsdp does not have; configure it with -DFSDP_CUDA=ON");
  }
  if (!type) throw Error("device type '" + device_type + "' is not known; use \"cpu\" (Gloo) or \"cuda\" (NCCL)");
  const c10::impl::VirtualGuardImpl guard(*type);
  const c10::Device device(*type, static_cast<c10::DeviceIndex>(comm::gpu_of(world, guard.deviceCount(), share_gpus)));
  guard.setDevice(device);
  return device;
}

/// Returns the result of `ask`, which exchanges messages with a row's peers. Throws CommError if they do not answer.
template <typename Ask>
auto ask_peers(const comm::Row& row, const char* whether, const Ask& ask) {
  try {
    return ask();
  } catch (...) {
    throw CommError("rank " + std::to_string(row.global_rank(row.rank)) + " of " + std::to_string(row.world_size) +
                    " could not ask its peers of mesh dimension '" + row.dim + "' whether they share " + whether + ": " +
                    current_exception_text() + ". A peer has failed or ended: see its own message, if there is one.");
  }
}

std::shared_ptr<comm::Communicator> make_cpu_communicator(const comm::Row& row, c10::intrusive_ptr<c10d::Backend> gloo,
                                                          const MeshOptions& options) {
  if (row.size() == 1) return std::make_shared<comm::PairwiseCommunicator>(row, std::move(gloo));
  const bool wanted = options.shared_memory && comm::process_environment("FSDP_SHARED_MEMORY") != "0";
  auto shared =
      ask_peers(row, "memory", [&] { return comm::SharedRow::connect(row.rank, row.global_ranks, *gloo, wanted, options.timeout); });
  if (shared == nullptr) return std::make_shared<comm::PairwiseCommunicator>(row, std::move(gloo));
  return std::make_shared<comm::SharedCommunicator>(row, gloo, std::move(shared));
}

std::shared_ptr<comm::Communicator> make_native_communicator(const comm::Row& row, c10::intrusive_ptr<c10d::Backend> backend,
                                                             c10::intrusive_ptr<c10d::Backend> gloo, comm::Group::Ends ends) {
  const int ranks_per_host =
      row.size() == 1 ? 1 : ask_peers(row, "a host", [&] { return comm::ranks_per_host(row.rank, row.global_ranks, *gloo); });
  return std::make_shared<comm::NativeCommunicator>(row, std::move(backend), std::move(gloo), ranks_per_host, ends);
}

/// The backend of one dimension: see StoreMesh::backend_of.
using BackendOf = std::function<c10::intrusive_ptr<c10d::Backend>(std::int64_t neighbours)>;

/// For measuring: whether a rank that is alone in its row calls the backend's collectives, as it does with peers.
bool calls_itself() { return comm::process_environment("FSDP_SINGLE_RANK_COLLECTIVES") == "1"; }

/// `neighbours` is the argument for backend_of.
std::shared_ptr<comm::Communicator> make_communicator(comm::Rendezvous& rendezvous, const comm::Row& row, c10::Device device,
                                                      const MeshOptions& options, const BackendOf& backend_of, std::int64_t neighbours = 0,
                                                      const std::string& suffix = "") {
  const std::string name = row.dim + "/" + std::to_string(row.global_ranks.front()) + "/" + suffix;
  auto gloo = rendezvous.gloo_group(row, name + "gloo");
  if (backend_of) {
    auto backend = row.size() == 1 && !calls_itself() ? c10::intrusive_ptr<c10d::Backend>() : backend_of(neighbours);
    return make_native_communicator(row, std::move(backend), std::move(gloo), comm::Group::Ends::kElsewhere);
  }
  if (device.is_cpu()) return make_cpu_communicator(row, std::move(gloo), options);
  auto backend = rendezvous.device_group(row, name + "device", device);
  return make_native_communicator(row, std::move(backend), std::move(gloo), comm::Group::Ends::kWithGroup);
}

// Returns the prefix of the next mesh. All ranks make meshes in the same order, so the number of a mesh identifies it on all of them.
std::string next_mesh_prefix() {
  static std::atomic<int> count{0};
  return "mesh" + std::to_string(count++);
}

std::size_t index_of(const std::vector<MeshDim>& dims, const std::string& name) {
  const auto found = std::find_if(dims.begin(), dims.end(), [&](const MeshDim& dim) { return dim.name == name; });
  if (found == dims.end()) throw Error("mesh " + describe(dims) + " has no dimension '" + name + "'");
  return static_cast<std::size_t>(found - dims.begin());
}

const DeviceMesh::State& defined(const std::shared_ptr<DeviceMesh::State>& state) {
  if (state == nullptr) throw Error("this DeviceMesh is undefined; make one with init_device_mesh()");
  return *state;
}

}  // namespace

c10::Device DeviceMesh::device() const { return fsdp::defined(state_).device; }

c10::DeviceType DeviceMesh::device_type() const {
  const State& state = fsdp::defined(state_);
  return state.stands_for.value_or(state.device.type());
}

const std::vector<MeshDim>& DeviceMesh::dims() const { return fsdp::defined(state_).dims; }

std::int64_t DeviceMesh::rank() const { return fsdp::defined(state_).rank; }

std::int64_t DeviceMesh::size() const {
  std::int64_t size = 1;
  for (const MeshDim& dim : dims()) size *= dim.size;
  return size;
}

std::int64_t DeviceMesh::size(const std::string& dim) const { return dims()[index_of(dims(), dim)].size; }

std::int64_t DeviceMesh::coordinate(const std::string& dim) const { return fsdp::defined(state_).coordinates[index_of(dims(), dim)]; }

DeviceMesh DeviceMesh::operator[](const std::string& dim) const { return sub({dim}); }

DeviceMesh DeviceMesh::sub(const std::vector<std::string>& dims) const {
  const State& state = fsdp::defined(state_);
  auto part = std::make_shared<State>(State{.device = state.device,
                                            .stands_for = state.stands_for,
                                            .rank = state.rank,
                                            .world_size = state.world_size,
                                            .dims = {},
                                            .coordinates = {},
                                            .rows = {},
                                            .joined = state.joined});
  std::size_t next = 0;
  for (const auto& dim : dims) {
    const std::size_t d = index_of(state.dims, dim);
    if (d < next) throw Error("mesh " + describe(state.dims) + ": give the dimensions of a sub-mesh in the mesh's order, each once");
    next = d + 1;
    part->dims.push_back(state.dims[d]);
    part->coordinates.push_back(state.coordinates[d]);
    part->rows.push_back(state.rows[d]);
  }
  if (dims.empty()) throw Error("a sub-mesh needs at least one dimension");
  return DeviceMesh(std::move(part));
}

std::shared_ptr<comm::Communicator> DeviceMesh::communicator(const std::string& dim) const {
  return fsdp::defined(state_).rows[index_of(dims(), dim)]->communicator;
}

std::shared_ptr<comm::Communicator> DeviceMesh::new_communicator(const std::string& dim, std::int64_t neighbours) const {
  const std::int64_t row = size(dim);
  if (neighbours < 0 || (neighbours > 0 && row % neighbours != 0)) {
    throw Error("mesh " + describe(dims()) + ": groups of " + std::to_string(neighbours) + " neighbours do not divide dimension '" + dim +
                "'");
  }
  return fsdp::defined(state_).rows[index_of(dims(), dim)]->make(neighbours == 0 ? row : neighbours);
}

std::shared_ptr<comm::Communicator> DeviceMesh::second_communicator(const std::string& dim, std::int64_t neighbours) const {
  auto& second = fsdp::defined(state_).rows[index_of(dims(), dim)]->second[neighbours];
  if (second == nullptr) second = new_communicator(dim, neighbours);
  return second;
}

double DeviceMesh::sum(double value) const {
  const auto all = comm::Ranks(*this).exchange(at::full({1}, value, at::kDouble), {.operation = "DeviceMesh::sum", .unit = {}});
  double sum = 0;
  for (std::int64_t rank = 0; rank < all.size(0); ++rank) sum += all.const_data_ptr<double>()[rank];
  return sum;
}

bool DeviceMesh::all(bool ok) const { return comm::Ranks(*this).agree(ok, {.operation = "DeviceMesh::all", .unit = {}}); }

void DeviceMesh::barrier() const {
  // When a rank leaves the barrier of dimension d, all ranks that differ from it in dimensions 0 to d only have arrived.
  for (const auto& row : fsdp::defined(state_).rows) row->communicator->barrier();
}

namespace {

void add_row(DeviceMesh::State& state, const std::shared_ptr<comm::Rendezvous>& rendezvous, comm::Row row, const MeshOptions& options,
             const BackendOf& backend_of = {}) {
  row.progress = rendezvous->progress();
  auto communicator = make_communicator(*rendezvous, row, state.device, options, backend_of);
  // All ranks of a row make its communicators in the same order, so the number of a communicator identifies it on all of them.
  const auto made = std::make_shared<int>(0);
  auto make = [rendezvous, row, made, device = state.device, options, backend_of](std::int64_t neighbours) {
    const auto part = neighbours_in(row, neighbours);
    return make_communicator(*rendezvous, part, device, options, backend_of, part.size(), std::to_string(++*made) + ".more/");
  };
  state.rows.push_back(std::make_shared<MeshRow>(MeshRow{.communicator = std::move(communicator), .make = std::move(make)}));
}

std::shared_ptr<JoinedRows> joined_rows(const std::shared_ptr<comm::Rendezvous>& rendezvous, const MeshOptions& options) {
  return std::make_shared<JoinedRows>(JoinedRows{
      .make = [rendezvous, options](
                  const comm::Row& ranks,
                  const std::string& name) { return make_cpu_communicator(ranks, rendezvous->gloo_group_across(ranks, name), options); },
      .make_for_messages =
          [rendezvous](const comm::Row& ranks, const std::string& name) {
            return std::make_shared<comm::PairwiseCommunicator>(ranks, rendezvous->gloo_group_across(ranks, name));
          }});
}

}  // namespace

DeviceMesh init_device_mesh(const std::string& device_type, std::vector<MeshDim> dims, MeshOptions options) {
  const comm::World world = comm::read_world(comm::process_environment);
  check_names(dims);
  resolve_sizes(dims, world.size);
  auto state = std::make_shared<DeviceMesh::State>();
  state->device = local_device(device_type, world, options.share_gpus);
  state->rank = world.rank;
  state->world_size = world.size;
  state->dims = std::move(dims);
  state->coordinates = coordinates_of(world.rank, state->dims);
  const auto rendezvous = std::make_shared<comm::Rendezvous>(world, next_mesh_prefix(), options.timeout);
  for (std::size_t d = 0; d < state->dims.size(); ++d) {
    add_row(*state, rendezvous, row_through(world.rank, state->dims, d), options);
  }
  state->joined = joined_rows(rendezvous, options);
  DeviceMesh mesh(std::move(state));
  mesh.barrier();  // The last rank has read the store now, so that rank 0, which serves it, may leave.
  return mesh;
}

DeviceMesh comm::make_store_mesh(const StoreMesh& options) {
  auto state = std::make_shared<DeviceMesh::State>();
  state->device = options.device;
  state->rank = options.rank;
  state->world_size = options.world_size;
  const auto rendezvous =
      std::make_shared<Rendezvous>(options.store, options.rank, options.world_size, options.prefix, options.options.timeout);
  for (std::size_t d = 0; d < options.dims.size(); ++d) {
    const auto& ranks = options.rows[d];
    const auto own = std::find(ranks.begin(), ranks.end(), options.rank);
    if (own == ranks.end()) {
      throw Error("rank " + std::to_string(options.rank) + " is not in its own row of mesh dimension '" + options.dims[d] + "'");
    }
    const auto position = own - ranks.begin();
    BackendOf backend_of;
    if (options.backend_of) backend_of = [all = options.backend_of, d](std::int64_t neighbours) { return all(d, neighbours); };
    state->dims.push_back({options.dims[d], static_cast<std::int64_t>(ranks.size())});
    state->coordinates.push_back(position);
    add_row(*state, rendezvous,
            {.dim = options.dims[d], .rank = static_cast<int>(position), .global_ranks = ranks, .world_size = options.world_size},
            options.options, backend_of);
  }
  if (!options.backend_of) state->joined = joined_rows(rendezvous, options.options);
  DeviceMesh mesh(std::move(state));
  mesh.barrier();
  return mesh;
}

DeviceMesh null_device_mesh(std::vector<MeshDim> dims, std::int64_t rank) {
  return comm::make_null_mesh({.dims = std::move(dims), .rank = rank});
}

DeviceMesh comm::make_null_mesh(NullMesh options) {
  auto& dims = options.dims;
  const auto rank = options.rank;
  check_names(dims);
  std::int64_t world_size = 1;
  for (const MeshDim& dim : dims) {
    if (dim.size < 1) throw Error("null mesh " + fsdp::describe(dims) + ": the size of '" + dim.name + "' must be given");
    world_size *= dim.size;
  }
  if (rank < 0 || rank >= world_size) throw Error("null mesh " + fsdp::describe(dims) + " has no rank " + std::to_string(rank));
  auto state = std::make_shared<DeviceMesh::State>();
  state->device = options.device;
  state->stands_for = options.stands_for;
  state->rank = rank;
  state->world_size = world_size;
  state->coordinates = coordinates_of(rank, dims);
  std::int64_t stride = world_size;
  for (std::size_t d = 0; d < dims.size(); ++d) {
    stride /= dims[d].size;
    const auto make = [position = static_cast<int>(state->coordinates[d]), stride, traffic = options.traffic](std::int64_t neighbours) {
      const int size = static_cast<int>(neighbours);
      return std::make_shared<NullCommunicator>(position % size, size, traffic ? traffic(size, stride) : Traffic::by_messages(size),
                                                stride);
    };
    state->rows.push_back(std::make_shared<MeshRow>(MeshRow{.communicator = make(dims[d].size), .make = make}));
  }
  state->dims = std::move(dims);
  return DeviceMesh(std::move(state));
}

}  // namespace fsdp
