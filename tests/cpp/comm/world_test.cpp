#include "comm/launch/world.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "fsdp/error.h"
#include "support/messages.h"

namespace fsdp::comm {
namespace world_test {

using testing::has;

using Variables = std::map<std::string, std::string>;

Getenv from(Variables variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

Variables merged(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

std::string error_of(const Variables& variables) {
  return testing::message_of([&] { read_world(from(variables)); });
}

const Variables kTorchrun = {
    {"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29400"}};
const Variables kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kMpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "6"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}};
const Variables kSrun = {{"SLURM_PROCID", "9"},
                         {"SLURM_NTASKS", "16"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_JOB_ID", "1234567"},
                         {"SLURM_STEP_ID", "2"},
                         {"SLURM_STEP_NODELIST", "gpu[003-004,9]"},
                         {"SLURM_JOB_NODELIST", "gpu[001-009]"}};

TEST(World, WithoutALauncherIsOneProcess) {
  const World world = read_world(from({}));
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.size, 1);
  EXPECT_EQ(world.local_rank, 0);
  EXPECT_TRUE(world.one_machine());
  EXPECT_FALSE(is_launched(from({})));
}

TEST(World, Torchrun) {
  const World world = read_world(from(kTorchrun));
  EXPECT_EQ(world.launcher, "torchrun");
  EXPECT_EQ(world.rank, 5);
  EXPECT_EQ(world.size, 8);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_size, 4);
  EXPECT_EQ(world.master_addr, "node7");
  EXPECT_EQ(world.master_port, 29400);
  EXPECT_FALSE(world.agent_store);
  EXPECT_EQ(world.restart_count, 0);
  EXPECT_FALSE(world.one_machine());
  EXPECT_TRUE(is_launched(from(kTorchrun)));
}

TEST(World, TorchrunsAgentServesTheStore) {
  const World world = read_world(from(merged(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "3"}})));
  EXPECT_TRUE(world.agent_store);
  EXPECT_EQ(world.restart_count, 3);
  EXPECT_FALSE(read_world(from(merged(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))).agent_store);
}

TEST(World, LaunchLocalsListeningSocket) {
  EXPECT_EQ(read_world(from(merged(kTorchrun, {{"FSDP_MASTER_LISTEN_FD", "11"}}))).listen_fd, 11);
  EXPECT_FALSE(read_world(from(kTorchrun)).listen_fd.has_value());
}

TEST(World, OneRankNeedsNoMeetingPoint) {
  const World world = read_world(from({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  EXPECT_EQ(world.size, 1);
  EXPECT_TRUE(is_launched(from({{"RANK", "0"}, {"WORLD_SIZE", "1"}})));
}

TEST(World, OpenMpi) {
  const World world = read_world(from(merged(kOpenMpi, {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "1234"}})));
  EXPECT_EQ(world.rank, 2);
  EXPECT_EQ(world.size, 4);
  EXPECT_EQ(world.local_rank, 2);
  EXPECT_EQ(world.master_addr, "10.0.0.1");
  EXPECT_EQ(world.master_port, 1234);
  EXPECT_TRUE(is_launched(from(kOpenMpi)));
}

TEST(World, OpenMpiOnOneMachineNeedsNoMeetingPoint) {
  const World a = read_world(from(merged(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-host-4711@1"}})));
  const World b = read_world(from(merged(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-host-4712@1"}})));
  EXPECT_EQ(a.master_addr, "127.0.0.1");
  EXPECT_GE(a.master_port, 15000);
  EXPECT_LT(a.master_port, 30000);
  EXPECT_NE(a.master_port, b.master_port);  // Two jobs at once.
}

TEST(World, Mpich) {
  const World world = read_world(from(merged(kMpich, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}})));
  EXPECT_EQ(world.rank, 1);
  EXPECT_EQ(world.size, 6);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_size, 3);
  EXPECT_TRUE(is_launched(from(kMpich)));
}

TEST(World, Srun) {
  const World world = read_world(from(kSrun));
  EXPECT_EQ(world.rank, 9);
  EXPECT_EQ(world.size, 16);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.master_addr, "gpu003");
  EXPECT_EQ(world.master_port, 15000 + (1234567 + 2) % 15000);
  EXPECT_TRUE(is_launched(from(kSrun)));
}

TEST(World, SrunsStepMayBeSmallerThanTheJob) {
  const World world = read_world(from(merged(kSrun, {{"SLURM_STEP_NUM_TASKS", "12"}, {"SLURM_STEP_NUM_NODES", "1"}})));
  EXPECT_EQ(world.size, 12);
  EXPECT_TRUE(world.one_machine());
}

TEST(World, MasterVariablesWinOverSlurms) {
  const World world = read_world(from(merged(kSrun, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "777"}})));
  EXPECT_EQ(world.master_addr, "head");
  EXPECT_EQ(world.master_port, 777);
}

TEST(World, ABatchScriptIsNoRank) {
  Variables batch = kSrun;
  batch.erase("SLURM_STEP_ID");
  EXPECT_FALSE(is_launched(from(batch)));
  EXPECT_EQ(read_world(from(batch)).size, 1);
}

TEST(World, MpirunAndSrunWithOneTaskLaunchNothing) {
  EXPECT_FALSE(is_launched(from({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}})));
  EXPECT_FALSE(is_launched(from({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_STEP_ID", "0"}})));
}

TEST(World, TorchrunComesFirstAndSrunLast) {
  EXPECT_EQ(read_world(from(merged(merged(kTorchrun, kOpenMpi), kSrun))).launcher, "torchrun");
  EXPECT_EQ(read_world(from(merged(kOpenMpi, kSrun))).launcher, "Open MPI");
  EXPECT_EQ(read_world(from(merged(kMpich, kSrun))).launcher, "MPICH");
}

TEST(World, MissingVariablesAreNamed) {
  const std::vector<const char*> needed = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
  for (const char* name : needed) {
    Variables variables = kTorchrun;
    variables.erase(name);
    EXPECT_TRUE(has(error_of(variables), std::string("environment variable ") + name + " is not set")) << error_of(variables);
  }
  EXPECT_TRUE(has(error_of({{"OMPI_COMM_WORLD_RANK", "0"}}), "OMPI_COMM_WORLD_SIZE is not set"));
  EXPECT_TRUE(has(error_of(kMpich), "MASTER_ADDR is not set"));
  EXPECT_TRUE(has(error_of(merged(kMpich, {{"MASTER_ADDR", "a"}})), "MASTER_PORT is not set"));
}

TEST(World, MalformedVariablesAreNamed) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"}) {
    for (const char* value : {"x", "-1", "3 ", "99999999999999999999"}) {
      const std::string error = error_of(merged(kTorchrun, {{name, value}}));
      EXPECT_TRUE(has(error, std::string(name) + " is '" + value + "'; expected a number from")) << error;
    }
  }
  EXPECT_TRUE(has(error_of(merged(kTorchrun, {{"RANK", "8"}})), "RANK is '8'; expected a number from 0 to 7"));
}

World local(std::optional<int> rank) {
  World world;
  world.rank = 5;
  world.local_rank = rank;
  return world;
}

std::string gpu_error(std::optional<int> rank, int visible, bool shared = false) {
  try {
    gpu_of(local(rank), visible, shared);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(World, ARankTakesTheGpuOfItsLocalRank) {
  EXPECT_EQ(gpu_of(local(0), 4, false), 0);
  EXPECT_EQ(gpu_of(local(3), 4, false), 3);
  EXPECT_TRUE(has(gpu_error(4, 4), "rank 5 is the machine's local rank 4, but only 4 GPUs are visible"));
  EXPECT_TRUE(has(gpu_error(std::nullopt, 2), "LOCAL_RANK is not set: rank 5 can't tell which of the 2 visible GPUs is its own"));
  EXPECT_TRUE(has(gpu_error(0, 0), "rank 5 sees no GPU"));
}

TEST(World, TheOnlyVisibleGpuIsEachRanksOwn) {
  EXPECT_EQ(gpu_of(local(3), 1, false), 0) << "SLURM's --gpus-per-task=1";
  EXPECT_EQ(gpu_of(local(std::nullopt), 1, false), 0);
}

TEST(World, RanksShareGpusInTurnWhenTold) {
  EXPECT_EQ(gpu_of(local(1), 2, true), 1);
  EXPECT_EQ(gpu_of(local(2), 2, true), 0);
  EXPECT_EQ(gpu_of(local(7), 3, true), 1);
  EXPECT_TRUE(has(gpu_error(std::nullopt, 2, true), "LOCAL_RANK is not set"));
}

TEST(World, FirstHost) {
  EXPECT_EQ(first_host("node1"), "node1");
  EXPECT_EQ(first_host("node1,node2"), "node1");
  EXPECT_EQ(first_host("node[03-05,9],other1"), "node03");
  EXPECT_EQ(first_host("node[7]"), "node7");
  EXPECT_EQ(first_host("node[7,9-10]"), "node7");
  EXPECT_EQ(first_host("node[07-08]-ib.cluster"), "node07-ib.cluster");
  EXPECT_EQ(first_host("rack[1-2]node[3,4]"), "rack1node3");
  EXPECT_EQ(first_host("my-node-[10-12]"), "my-node-10");
  EXPECT_THROW(first_host(""), Error);
  EXPECT_THROW(first_host("node["), Error);
  EXPECT_THROW(first_host("node[]"), Error);
}

}  // namespace world_test
}  // namespace fsdp::comm
