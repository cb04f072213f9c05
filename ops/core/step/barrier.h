// Where the workers of a step wait for each other, on one server (docs/protocol.md, 9).
//
// Every member sends one message a step. The last one to arrive merges what all have sent, and then
// all are answered. Members do the same steps in the same order, so a member is never more than one
// step ahead. Steps are numbered from 0 in a round; a round has the members that it begins with, of
// whom some may leave.

#ifndef HET_TF_OPS_CORE_STEP_BARRIER_H_
#define HET_TF_OPS_CORE_STEP_BARRIER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "ops/core/mutex.h"
#include "ops/core/status.h"

namespace het_tf {

// Safe for concurrent use.
class StepBarrier {
 public:
  // Merges what the members have sent. Called once a step, by whoever comes last.
  using Merge = std::function<Status()>;
  // Called once, from any thread.
  using Done = std::function<void(const Status&)>;

  // Who waits is told that the round is over. num_members: numbered from 0.
  void Begin(int64_t round, int64_t num_members);

  // A worker is going to send the messages of a member. Whether it may: not if the round is over,
  // the member has left, or a step of the round is merged.
  bool Join(int64_t round, int64_t member, int64_t worker);

  // Whether a member's message of a step may be taken: not if its round is over, or it has left.
  Status Check(int64_t round, int64_t member, int64_t step) const;

  // A member has sent all that it has for a step. is_last: it leaves when the step is merged.
  // merge: the same for all members. done: when all have arrived and the step is merged. Of two
  // messages of a member the first is told that it was replaced.
  void Arrive(int64_t round, int64_t member, int64_t step, bool is_last, const Merge& merge,
              Done done);

  // The member's message is not waited for any more; what it has sent counts.
  void GiveUp(int64_t round, int64_t member, int64_t step);

  // The others wait for the member no longer. Of another round: no effect.
  void Leave(int64_t round, int64_t member);

  // Of the round: the step that is not merged yet, and the members that have not arrived there.
  struct Waiting {
    int64_t round = 0;
    int64_t step = 0;
    std::vector<int64_t> absent;
    std::vector<int64_t> workers;  // of these; kNobody: none has joined
  };
  static constexpr int64_t kNobody = -1;
  Waiting waiting() const;

 private:
  struct Member {
    int64_t worker = kNobody;
    bool has_arrived = false;
    bool is_last = false;
    Done done;  // of its last message; empty: given up
  };

  Status CheckLocked(int64_t round, int64_t member, int64_t step) const HET_REQUIRES(mutex_);
  // Merges the step if all have arrived.
  void OpenIfAllAreThere();

  mutable Mutex mutex_;
  int64_t round_ HET_GUARDED_BY(mutex_) = 0;
  int64_t step_ HET_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, Member> members_ HET_GUARDED_BY(mutex_);
  Merge merge_ HET_GUARDED_BY(mutex_);
  bool merges_ HET_GUARDED_BY(mutex_) = false;  // under way
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_STEP_BARRIER_H_
