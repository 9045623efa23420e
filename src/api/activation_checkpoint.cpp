// Activation checkpointing. Forward runs `fn`, notes which edges lead out of the graph that this builds, and replaces the graph by one node
// with the same edges. The node's backward runs `fn` again, and then runs backward through the new graph, within the outer backward. The
// gradients that arrive at the exits of the new graph are those that the node returns.
//
// Unlike torch's reentrant checkpoint, the node has edges to everything that `fn` used, parameters included. So grad() and backward() for
// chosen tensors work, and no input needs to require a gradient.
//
// On a sharded model, the repeated forward runs within the outer backward and before the inner one, so it notifies the engine of the outer
// one.

#include "fsdp/activation_checkpoint.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/no_autocast_cache.h"
#include "base/text.h"
#include "fsdp/error.h"
#include "trigger/autograd_pass.h"

namespace fsdp {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// A reference to a node of autograd's graph, of the type that torch uses (a shared_ptr in torch 2.11).
template <typename T>
using NodePtr =
    std::conditional_t<std::is_same_v<decltype(Edge::function), std::shared_ptr<Node>>, std::shared_ptr<T>, c10::intrusive_ptr<T>>;

template <typename T, typename... Arguments>
NodePtr<T> make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr<T>, std::shared_ptr<T>>) {
    // Autograd's deleter keeps the destruction of a long chain of nodes from using up the stack.
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
}

/// The accumulator of a leaf (a parameter), or null.
const AccumulateGrad* leaf(const Node& node) { return dynamic_cast<const AccumulateGrad*>(&node); }

/// The part of autograd's graph that this thread adds from now on. Nodes are distinguished from older ones by their number, which counts
/// per thread.
class NewGraph {
 public:
  NewGraph() : first_(at::sequence_number::peek()), thread_(at::RecordFunction::currentThreadId()) {}

  bool contains(const Node& node) const { return node.thread_id() == thread_ && node.sequence_nr() >= first_ && leaf(node) == nullptr; }
  /// True if the tensor was computed here, and not only handed on.
  bool computed(const at::Tensor& tensor) const { return tensor.defined() && tensor.grad_fn() != nullptr && contains(*tensor.grad_fn()); }

  /// Calls visit(Edge&) for each edge from the graph of these tensors to an older node or a leaf. The order depends on the graph alone.
  template <typename Visit>
  void for_each_exit(const variable_list& tensors, const Visit& visit) const {
    std::vector<Node*> stack;
    std::unordered_set<Node*> seen;
    const auto enter = [&](Node* node) {
      if (seen.insert(node).second) stack.push_back(node);
    };
    for (const auto& tensor : tensors) {
      if (computed(tensor)) enter(tensor.grad_fn().get());
    }
    while (!stack.empty()) {
      Node* node = stack.back();
      stack.pop_back();
      for (auto& edge : node->next_edges()) {
        if (!edge.is_valid()) continue;
        if (contains(*edge.function)) {
          enter(edge.function.get());
        } else {
          visit(edge);
        }
      }
    }
  }

 private:
  std::uint64_t first_;
  std::uint64_t thread_;
};

/// The state that operators read beside their arguments: random generators and autocast's settings. It is kept from the first run for the
/// second.
class Surroundings {
 public:
  explicit Surroundings(bool with_rng_state) {
    add_autocast(at::kCPU);
    if (with_rng_state) add(at::globalContext().defaultGenerator(at::kCPU));
    const auto accelerator = at::accelerator::getAccelerator();
    if (!accelerator.has_value() || at::accelerator::deviceCount() == 0) return;
    add_autocast(accelerator.value());
    const auto index = at::accelerator::getDeviceIndex();
    // A device without a context is not used here, and asking for its generator would make a context.
    if (with_rng_state && at::globalContext().getAcceleratorHooksInterface(accelerator).hasPrimaryContext(index)) {
      add(at::globalContext().defaultGenerator(c10::Device(accelerator.value(), index)));
    }
  }

  /// Returns the present values of the same settings.
  Surroundings now() const {
    Surroundings current;
    for (const auto& autocast : autocast_) current.add_autocast(autocast.device);
    for (const auto& generator : generators_) current.add(generator.generator);
    return current;
  }

  void set() const {
    for (const auto& autocast : autocast_) {
      at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
      at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
    }
    for (auto [generator, state] : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  struct GeneratorState {
    at::Generator generator;
    at::Tensor state;
  };

  Surroundings() = default;

  void add_autocast(c10::DeviceType device) {
    autocast_.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
  }
  void add(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    auto state = generator.get_state();
    generators_.push_back({generator, std::move(state)});
  }

  std::vector<Autocast> autocast_;
  std::vector<GeneratorState> generators_;
};

/// A guard that sets the kept state, and at its end restores the state that it found.
class SurroundingsGuard {
 public:
  explicit SurroundingsGuard(const Surroundings& kept) : before_(kept.now()) { kept.set(); }
  ~SurroundingsGuard() { before_.set(); }
  SurroundingsGuard(const SurroundingsGuard&) = delete;
  SurroundingsGuard& operator=(const SurroundingsGuard&) = delete;

 private:
  Surroundings before_;
};

/// Replaces the node to which an exit of the repeated graph led, and keeps the gradient that arrives.
class Exit final : public Node {
 public:
  explicit Exit(const torch::autograd::InputMetadata& metadata) { input_metadata_.push_back(metadata); }
  at::Tensor take() { return std::move(gradient_); }

 private:
  variable_list apply(variable_list&& gradients) override {
    gradient_ = std::move(gradients.front());
    return {};
  }

  at::Tensor gradient_;
};

/// The node that stands for the graph of `fn`. Its inputs are the gradients of those outputs that `fn` computed, its outputs the gradients
/// of all that `fn` used.
class ActivationCheckpointBackward final : public Node {
 public:
  ActivationCheckpointBackward(detail::TensorFunction fn, Surroundings surroundings, std::vector<SavedVariable> inputs)
      : fn_(std::move(fn)), surroundings_(std::move(surroundings)), inputs_(std::move(inputs)) {}

  /// Call it after the first run. Notes which outputs were computed, and from what.
  void describe(const NewGraph& graph, const variable_list& outputs) {
    for (const auto& output : outputs) computed_.push_back(graph.computed(output));
    graph.for_each_exit(outputs, [&](const Edge& edge) {
      if (!exits_.emplace(edge, exits_.size()).second) return;
      add_next_edge(edge);
      if (const auto* parameter = leaf(*edge.function)) parameters_.emplace_back(parameter->variable, parameter->variable._version());
    });
  }
  const std::vector<bool>& computed() const { return computed_; }

  variable_list apply(variable_list&& gradients) override {
    // Autograd's own nodes lock, too, because two threads may run backward through one graph.
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(fn_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    validate();

    variable_list outputs;
    const NewGraph graph;
    {
      const at::AutoGradMode with_grad(true);
      const SurroundingsGuard as_before(surroundings_);
      const NoAutocastCache no_cache;  // [One cache per graph]
      variable_list inputs;
      inputs.reserve(inputs_.size());
      for (const auto& input : inputs_) inputs.push_back(input.unpack(getptr()));
      outputs = fn_(std::move(inputs));
    }
    auto exits = cut(graph, outputs);

    edge_list roots;
    variable_list root_gradients;
    std::size_t next = 0;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!computed_[i]) continue;
      auto& gradient = gradients[next++];
      if (!gradient.defined()) continue;
      roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
      root_gradients.push_back(std::move(gradient));
    }
    outputs.clear();  // the inner backward frees activations as it goes
    if (!roots.empty()) {
      torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                                            /*accumulate_grad=*/true);
    }
    variable_list results;
    results.reserve(exits.size());
    for (const auto& exit : exits) results.push_back(exit ? exit->take() : at::Tensor());
    return results;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    fn_ = nullptr;
    inputs_.clear();
    exits_.clear();
    parameters_.clear();
  }

 private:
  void validate() const {
    if (at::GradMode::is_enabled()) {
      throw Error(
          "fsdp::activation_checkpoint: backward with create_graph = true, but what a checkpoint computes can't be differentiated twice; "
          "call the "
          "function without a checkpoint where second derivatives are needed");
    }
    // A saved input has its own check when it is unpacked.
    for (const auto& [parameter, version] : parameters_) {
      if (parameter._version() == version) continue;
      throw Error("fsdp::activation_checkpoint: a parameter of shape " + in_brackets(parameter.sizes()) +
                  " that the function uses was written between forward and backward (by an optimizer step, say), so repeating the function "
                  "would compute something else; run forward again after each step");
    }
  }

  /// Ends the repeated graph where the first one ended. At each exit gradients are kept for this node to return, except where they can go
  /// on at once: the inner backward then hands them to their parameter one by one, as any backward does, and a sharded model reduces them
  /// on departure from each unit, however many units `fn` comprises.
  std::vector<NodePtr<Exit>> cut(const NewGraph& graph, const variable_list& outputs) {
    bool same = outputs.size() == computed_.size();
    for (std::size_t i = 0; same && i < outputs.size(); ++i) same = graph.computed(outputs[i]) == computed_[i];
    std::vector<NodePtr<Exit>> exits(exits_.size());
    std::unordered_set<std::size_t> found;
    graph.for_each_exit(outputs, [&](Edge& edge) {
      const auto known = exits_.find(edge);
      same = same && known != exits_.end();
      if (!same) return;
      const auto k = known->second;
      found.insert(k);
      if (accumulates_within(k)) return;
      if (!exits[k]) exits[k] = make_node<Exit>(edge.function->input_metadata(edge.input_nr));
      edge = Edge(exits[k], 0);
    });
    if (!same || found.size() != exits_.size()) {
      throw Error(
          "fsdp::activation_checkpoint: repeated for backward, the function gave other outputs or used other tensors that require a "
          "gradient than in "
          "forward; it must do the same each time, whatever it counts, draws or has seen in between");
    }
    return exits;
  }

  /// True if the inner backward may accumulate into exit k's leaf by itself: if this backward is for all leaves, not for chosen tensors,
  /// and it would not be noticed that the leaf's node runs once more, without a gradient, when this node has returned. (An enclosing
  /// checkpoint that collects gradients has put its own exit there.)
  bool accumulates_within(std::size_t k) const {
    Node& node = *next_edges_[k].function;
    return leaf(node) != nullptr && trigger::is_for_all_leaves() && node.tensor_pre_hooks().empty() && node.pre_hooks().empty() &&
           node.post_hooks().empty();
  }

  detail::TensorFunction fn_;
  Surroundings surroundings_;
  std::vector<SavedVariable> inputs_;
  std::vector<bool> computed_;  // for each output of `fn`
  // The edges that led out of the first graph, each with its place among this node's. Not next_edges() itself: in the graph of an enclosing
  // checkpoint that is cut in its turn.
  std::unordered_map<Edge, std::size_t> exits_;
  std::vector<std::pair<at::Tensor, std::int64_t>> parameters_;  // with their versions
};

}  // namespace

std::vector<at::Tensor> detail::activation_checkpoint(const ActivationCheckpointOptions& options, TensorFunction fn,
                                                      std::vector<at::Tensor> inputs) {
  if (!at::GradMode::is_enabled()) return fn(std::move(inputs));
  std::vector<SavedVariable> saved;
  for (const auto& input : inputs) {
    saved.emplace_back(input, /*is_output=*/false);
    // Views and leaves make their node when it is first asked for: now, not inside of `fn`.
    if (input.defined() && input.requires_grad()) torch::autograd::impl::gradient_edge(input);
  }
  Surroundings surroundings(options.preserve_rng_state);
  variable_list outputs;
  const NewGraph graph;
  {
    // [One cache per graph] An entry that one run of `fn` makes in autocast's cache of cast weights belongs to the graph of that run, and
    // the other run, or another checkpoint, must not find it.
    const NoAutocastCache no_cache;
    outputs = fn(std::move(inputs));
  }
  const auto node = make_node<ActivationCheckpointBackward>(std::move(fn), std::move(surroundings), std::move(saved));
  node->describe(graph, outputs);
  // The first graph ends here. Outputs that it did not compute are what they would be without a checkpoint.
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!node->computed()[i]) continue;
    outputs[i] = outputs[i].detach();
    torch::autograd::set_history(outputs[i], node);
  }
  return outputs;
}

}  // namespace fsdp
