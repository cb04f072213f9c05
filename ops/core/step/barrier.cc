#include "ops/core/step/barrier.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace het_tf {

void StepBarrier::Begin(int64_t round, int64_t num_members) {
  std::vector<Done> dones;
  {
    MutexLock lock(&mutex_);
    for (auto& entry : members_) {
      if (entry.second.done) dones.push_back(std::move(entry.second.done));
    }
    members_.clear();
    for (int64_t member = 0; member < num_members; ++member) members_[member] = Member();
    round_ = round;
    step_ = 0;
    merge_ = nullptr;
  }
  for (const Done& done : dones) done(FailedPrecondition("the round of the step is over"));
}

bool StepBarrier::Join(int64_t round, int64_t member, int64_t worker) {
  MutexLock lock(&mutex_);
  const auto found = members_.find(member);
  if (round != round_ || found == members_.end() || step_ > 0) return false;
  found->second.worker = worker;
  return true;
}

Status StepBarrier::CheckLocked(int64_t round, int64_t member, int64_t step) const {
  if (round != round_) {
    return FailedPrecondition("round = ", round, " of the steps is over: this is round ", round_);
  }
  if (members_.count(member) == 0) {
    return FailedPrecondition("member = ", member, " takes no part in round ", round_);
  }
  if (step != step_) {
    return FailedPrecondition("step = ", step, " of member ", member, ", but the round is at step ",
                              step_);
  }
  return Status();
}

Status StepBarrier::Check(int64_t round, int64_t member, int64_t step) const {
  MutexLock lock(&mutex_);
  return CheckLocked(round, member, step);
}

void StepBarrier::Arrive(int64_t round, int64_t member, int64_t step, bool is_last,
                         const Merge& merge, Done done) {
  Done replaced;
  Status status;
  {
    MutexLock lock(&mutex_);
    status = CheckLocked(round, member, step);
    if (status.ok()) {
      Member& arrived = members_[member];
      arrived.has_arrived = true;
      arrived.is_last = is_last;
      replaced = std::exchange(arrived.done, std::move(done));
      merge_ = merge;
    }
  }
  if (replaced) replaced(FailedPrecondition("the message of member ", member, " came again"));
  if (status.ok()) {
    OpenIfAllAreThere();
  } else {
    done(status);
  }
}

void StepBarrier::GiveUp(int64_t round, int64_t member, int64_t step) {
  Done done;
  {
    MutexLock lock(&mutex_);
    const auto found = members_.find(member);
    if (round != round_ || step != step_ || found == members_.end()) return;
    done = std::exchange(found->second.done, nullptr);
  }
  if (done) done(Cancelled("the step of member ", member, " was given up"));
}

void StepBarrier::Leave(int64_t round, int64_t member) {
  Done done;
  {
    MutexLock lock(&mutex_);
    const auto found = members_.find(member);
    if (round != round_ || found == members_.end()) return;
    done = std::move(found->second.done);
    members_.erase(found);
  }
  if (done) done(FailedPrecondition("member ", member, " takes no part in the round any more"));
  OpenIfAllAreThere();
}

void StepBarrier::OpenIfAllAreThere() {
  const auto is_absent = [](const auto& entry) { return !entry.second.has_arrived; };
  while (true) {
    Merge merge;
    int64_t round;
    {
      MutexLock lock(&mutex_);
      if (merges_ || members_.empty()) return;
      if (std::any_of(members_.begin(), members_.end(), is_absent)) return;
      merges_ = true;
      merge = std::exchange(merge_, nullptr);
      round = round_;
    }
    const Status status = merge();
    std::vector<Done> dones;
    {
      MutexLock lock(&mutex_);
      merges_ = false;
      if (round != round_)
        continue;  // those of the step were told; perhaps all of the next are there
      ++step_;
      for (auto entry = members_.begin(); entry != members_.end();) {
        Member& member = entry->second;
        member.has_arrived = false;
        if (member.done) dones.push_back(std::exchange(member.done, nullptr));
        entry = member.is_last ? members_.erase(entry) : std::next(entry);
      }
    }
    for (const Done& done : dones) done(status);
    return;
  }
}

StepBarrier::Waiting StepBarrier::waiting() const {
  MutexLock lock(&mutex_);
  Waiting waiting = {round_, step_, {}, {}};
  for (const auto& [number, member] : members_) {
    if (member.has_arrived) continue;
    waiting.absent.push_back(number);
    waiting.workers.push_back(member.worker);
  }
  return waiting;
}

}  // namespace het_tf
