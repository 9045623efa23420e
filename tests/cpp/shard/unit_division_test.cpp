// Which parameters belong to which unit.

#include "shard/unit_division.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/error.h"
#include "support/messages.h"

namespace fsdp::shard {
namespace unit_division_test {

using testing::message_of;

/// A module of parts that a test names.
struct Box : torch::nn::Module {
  Box& parameter(const std::string& name, const at::Tensor& tensor = {}) {
    register_parameter(name, tensor.defined() ? tensor : at::zeros({2}));
    return *this;
  }
  Box& child(const std::string& name, std::shared_ptr<Box> box) {
    register_module(name, std::move(box));
    return *this;
  }
};

std::shared_ptr<Box> box() { return std::make_shared<Box>(); }

UnitPredicate named(std::vector<std::string> names) {
  return [names](const std::string& name, const torch::nn::Module&) { return std::find(names.begin(), names.end(), name) != names.end(); };
}

/// "unit(parent): parameters", the root is "/".
std::vector<std::string> shown(const torch::nn::Module& root, const DivisionRules& rules) {
  const auto plans = divide(root, rules);
  const auto name = [&](std::size_t k) { return k == 0 ? "/" : plans[k].name; };
  std::vector<std::string> lines;
  for (std::size_t k = 0; k < plans.size(); ++k) {
    std::string line = name(k);
    if (plans[k].parent != UnitPlan::kNoParent) {
      EXPECT_LT(plans[k].parent, k);  // Enclosing units come first.
      line += "(" + name(plans[k].parent) + ")";
    }
    line += ":";
    for (const auto& [parameter, tensor] : plans[k].parameters) line += " " + parameter;
    lines.push_back(line);
  }
  return lines;
}

std::vector<std::string> shown(const torch::nn::Module& root, const UnitPredicate& is_unit) { return shown(root, DivisionRules{is_unit}); }

using Lines = std::vector<std::string>;

TEST(UnitDivision, TheRootIsAUnit) {
  Box root;
  root.parameter("w").child("a", box());
  EXPECT_EQ(shown(root, UnitPredicate()), Lines{"/: w"});
  EXPECT_EQ(shown(Box(), UnitPredicate()), Lines{"/:"});
  // Even if the predicate takes everything, the root is not its own child.
  EXPECT_EQ(shown(root, [](const std::string&, const torch::nn::Module&) { return true; }), (Lines{"/: w", "a(/):"}));
}

TEST(UnitDivision, ParametersBelongToTheClosestUnit) {
  const auto inner = box();
  inner->parameter("w").parameter("b");
  const auto outer = box();
  outer->parameter("w").child("inner", inner).child("plain", box());
  Box root;
  root.parameter("w").child("outer", outer);
  EXPECT_EQ(shown(root, UnitPredicate()), Lines{"/: w outer.w outer.inner.w outer.inner.b"});
  EXPECT_EQ(shown(root, named({"outer"})), (Lines{"/: w", "outer(/): outer.w outer.inner.w outer.inner.b"}));
  EXPECT_EQ(shown(root, named({"outer.inner"})), (Lines{"/: w outer.w", "outer.inner(/): outer.inner.w outer.inner.b"}));
  EXPECT_EQ(shown(root, named({"outer", "outer.inner"})),
            (Lines{"/: w", "outer(/): outer.w", "outer.inner(outer): outer.inner.w outer.inner.b"}));
}

TEST(UnitDivision, GroupsAreOneUnit) {
  const auto leaf = [](const char* name) {
    auto made = box();
    made->parameter(name);
    return made;
  };
  const auto outer = leaf("w");
  outer->child("inner", leaf("i"));
  Box root;
  root.parameter("w").child("a", leaf("x")).child("outer", outer).child("b", leaf("y"));
  EXPECT_EQ(shown(root, {.units = named({"outer"}), .unit_groups = {{"a", "b"}}}),
            (Lines{"/: w", "a+b(/): a.x b.y", "outer(/): outer.w outer.inner.i"}));
  // Found within another unit and outside of it: it lies in what encloses both.
  EXPECT_EQ(shown(root, {.units = named({"outer"}), .unit_groups = {{"outer.inner", "b"}}}),
            (Lines{"/: w a.x", "outer(/): outer.w", "outer.inner+b(/): outer.inner.i b.y"}));
  // One of the modules in another.
  EXPECT_EQ(shown(root, {.unit_groups = {{"outer", "outer.inner"}}}),
            (Lines{"/: w a.x b.y", "outer+outer.inner(/): outer.w outer.inner.i"}));
  const auto refusal = [&](std::vector<std::vector<std::string>> groups) {
    return message_of([&] { divide(root, {.unit_groups = std::move(groups)}); });
  };
  EXPECT_NE(refusal({{"a", "c"}}).find("'c', which the model does not have"), std::string::npos) << refusal({{"a", "c"}});
  EXPECT_NE(refusal({{"a", "b"}, {"b"}}).find("'b' twice"), std::string::npos) << refusal({{"a", "b"}, {"b"}});
}

TEST(UnitDivision, IgnoredParametersBelongToNoUnit) {
  const auto child = box();
  child->parameter("kept").parameter("left");
  Box root;
  root.parameter("left").child("c", child);
  const auto ignore = [](const std::string& name, const at::Tensor&) { return name.ends_with("left"); };
  EXPECT_EQ(shown(root, {.units = named({"c"}), .ignore = ignore}), (Lines{"/:", "c(/): c.kept"}));
}

TEST(UnitDivision, OrderIsThatOfNamedParameters) {
  torch::nn::TransformerEncoder model(torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayerOptions(8, 2), 3));
  const auto plans = divide(*model, {.units = each<torch::nn::LinearImpl>()});
  std::map<std::string, std::size_t> position;
  for (const auto& item : model->named_parameters()) position.emplace(item.key(), position.size());
  std::size_t seen = 0;
  for (const auto& plan : plans) {
    std::size_t last = 0;
    for (const auto& [name, parameter] : plan.parameters) {
      EXPECT_TRUE(parameter.is_same(model->named_parameters()[name])) << name;
      EXPECT_GE(position.at(name), last) << name;
      last = position.at(name);
      ++seen;
    }
  }
  EXPECT_EQ(seen, position.size());
}

TEST(UnitDivision, ByTypeAndByName) {
  struct Model : torch::nn::Module {
    Model() {
      register_module("a", torch::nn::Linear(2, 2));
      register_module("b", torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
      register_module("c", torch::nn::Linear(2, 2));
    }
  };
  const Model model;
  // A holder stands for its module.
  EXPECT_EQ(shown(model, each<torch::nn::Linear>()), shown(model, each<torch::nn::LinearImpl>()));
  EXPECT_EQ((shown(model, each<torch::nn::Linear, torch::nn::LayerNormImpl>())),
            (shown(model, each<torch::nn::LinearImpl, torch::nn::LayerNorm>())));
  EXPECT_EQ(shown(model, each<torch::nn::LinearImpl>()), (Lines{"/: b.weight b.bias", "a(/): a.weight a.bias", "c(/): c.weight c.bias"}));
  EXPECT_EQ((shown(model, each<torch::nn::LinearImpl, torch::nn::LayerNormImpl>())),
            (Lines{"/:", "a(/): a.weight a.bias", "b(/): b.weight b.bias", "c(/): c.weight c.bias"}));
  EXPECT_EQ(shown(model, named({"b"})), (Lines{"/: a.weight a.bias c.weight c.bias", "b(/): b.weight b.bias"}));
}

TEST(UnitDivision, UndefinedParametersAreNone) {
  struct Model : torch::nn::Module {
    Model() {
      register_parameter("none", at::Tensor(), /*requires_grad=*/false);
      register_parameter("w", at::zeros({2}));
      register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)));
    }
  };
  EXPECT_EQ(shown(Model(), each<torch::nn::LinearImpl>()), (Lines{"/: w", "linear(/): linear.weight"}));
}

TEST(UnitDivision, BuffersAreNotParameters) {
  torch::nn::BatchNorm1d norm(3);
  EXPECT_EQ(shown(*norm, UnitPredicate()), Lines{"/: weight bias"});
}

TEST(UnitDivision, SharedParameterLiesInTheClosestCommonAncestor) {
  const auto w = at::zeros({2});
  const auto a = box();
  const auto b = box();
  a->parameter("w", w).parameter("own");
  b->parameter("w", w).parameter("own");
  Box root;
  root.child("a", a).child("b", b);
  EXPECT_EQ(shown(root, named({"a", "b"})), (Lines{"/: a.w", "a(/): a.own", "b(/): b.own"}));
  EXPECT_EQ(shown(root, named({"a"})), (Lines{"/: a.w b.own", "a(/): a.own"}));
  EXPECT_EQ(shown(root, UnitPredicate()), Lines{"/: a.w a.own b.own"});

  // Below a common unit that is not the root.
  const auto middle = box();
  middle->child("a", a).child("b", b);
  Box top;
  top.parameter("w").child("m", middle);
  EXPECT_EQ(shown(top, named({"m", "m.a", "m.b"})), (Lines{"/: w", "m(/): m.a.w", "m.a(m): m.a.own", "m.b(m): m.b.own"}));
  // With an enclosing unit itself.
  middle->parameter("tied", w);
  EXPECT_EQ(shown(top, named({"m", "m.a", "m.b"})), (Lines{"/: w", "m(/): m.tied", "m.a(m): m.a.own", "m.b(m): m.b.own"}));
}

TEST(UnitDivision, SharedParameterOfUnitsAtDifferentDepths) {
  const auto w = at::zeros({2});
  const auto deep = box();
  deep->parameter("w", w).parameter("own");
  const auto outer = box();
  outer->parameter("own").child("deep", deep);
  const auto flat = box();
  flat->parameter("w", w);
  Box root;
  root.child("outer", outer).child("flat", flat);
  EXPECT_EQ(shown(root, named({"outer", "outer.deep", "flat"})),
            (Lines{"/: outer.deep.w", "outer(/): outer.own", "outer.deep(outer): outer.deep.own", "flat(/):"}));
}

TEST(UnitDivision, OneTensorUnderTwoNamesOfAModule) {
  const auto w = at::zeros({2});
  const auto a = box();
  a->parameter("w", w).parameter("same", w);
  Box root;
  root.child("a", a);
  EXPECT_EQ(shown(root, named({"a"})), (Lines{"/:", "a(/): a.w"}));
}

TEST(UnitDivision, SharedModuleIsOneUnitInTheCommonAncestor) {
  const auto shared = box();
  shared->parameter("w");
  const auto a = box();
  const auto b = box();
  a->parameter("w").child("s", shared);
  b->parameter("w").child("s", shared);
  Box root;
  root.child("a", a).child("b", b);
  EXPECT_EQ(shown(root, named({"a", "b", "a.s", "b.s"})), (Lines{"/:", "a(/): a.w", "a.s(/): a.s.w", "b(/): b.w"}));
  // Not a unit: its parameters are shared by those that reach it.
  EXPECT_EQ(shown(root, named({"a", "b"})), (Lines{"/: a.s.w", "a(/): a.w", "b(/): b.w"}));
}

// The parameter is known to the first place before its unit turns out to be shared with another.
TEST(UnitDivision, SharedModuleThatSharesAParameter) {
  const auto w = at::zeros({2});
  const auto inner = box();
  inner->parameter("w", w);
  const auto shared = box();
  shared->parameter("own").child("inner", inner);
  const auto a = box();
  const auto b = box();
  a->parameter("w", w).child("s", shared);
  b->child("s", shared);
  Box root;
  root.child("a", a).child("b", b);
  EXPECT_EQ(shown(root, named({"a", "b", "a.s", "a.s.inner"})), (Lines{"/: a.w", "a(/):", "a.s(/): a.s.own", "a.s.inner(a.s):", "b(/):"}));
}

}  // namespace unit_division_test
}  // namespace fsdp::shard
