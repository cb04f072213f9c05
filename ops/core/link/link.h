// What one worker and one shard owe each other: every push merged exactly once, whatever becomes of
// the messages that carry it (docs/protocol.md, 3).
//
// A link knows nothing of rows. Its owner cuts pushes, which are bytes with a sequence number, and
// the link says which of them a request carries, when they are merged, and whether a reply speaks
// of the shard as it is now.
//
// Not safe for concurrent use; its owner has a lock.

#ifndef HET_TF_OPS_CORE_LINK_LINK_H_
#define HET_TF_OPS_CORE_LINK_LINK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "ops/core/status.h"
#include "ops/core/thread_annotations.h"

namespace het_tf {

class Link {
 public:
  // Which rows, and which memory of this cache, a shard has: both new after it was made, cleared or
  // restored; the session also after it forgot the cache. Zeros: not heard of yet.
  struct Epoch {
    uint64_t incarnation = 0;
    uint64_t session = 0;

    bool operator==(const Epoch& other) const {
      return incarnation == other.incarnation && session == other.session;
    }
    bool operator!=(const Epoch& other) const { return !(*this == other); }
  };

  // What a push has of a row: the owner's.
  struct Row {
    uint32_t slot;
    uint32_t updates;
    uint32_t units;
  };

  struct Push {
    uint64_t sequence = 0;
    uint64_t carrier = 0;                // the request under way that carried it last; 0: none
    std::shared_ptr<const char> memory;  // of the request that carried it first
    const char* bytes = nullptr;         // (size), within that memory
    size_t size = 0;
    int64_t updates = 0;
    std::vector<Row> rows;  // in any order
  };

  // A request that went out. It is open until its reply came or its step failed.
  struct Request {
    uint64_t number = 0;  // of this link; 0: there was nothing to say
    Epoch epoch;
  };

  // What a reply says of the pushes: all up to this one are merged.
  struct Answer {
    Epoch epoch;
    uint64_t acknowledged = 0;  // a sequence
  };

  // What a reply is about.
  enum class Standing {
    kCurrent,  // the shard as the link knows it
    kNew,      // a shard that started again, or forgot this cache: what was held of it is void
    kOld,      // neither: it may serve the step that asked, and changes nothing else
  };

  const Epoch& epoch() const { return epoch_; }
  uint64_t cut() const { return cut_; }
  uint64_t acknowledged() const { return acknowledged_; }

  // The sequence of a push that is about to be cut.
  uint64_t NextSequence() const { return cut_ + 1; }
  void AddPush(Push push);

  // Of the pushes that are not acknowledged, which a request carries.
  enum class Carry {
    kIdle,     // those that no other request has under way
    kAwaited,  // those; it waits for the others, whose requests may come later (Asked::awaited)
    kAll,
  };
  // These pushes, oldest first. Valid until the next call of another function.
  std::vector<const Push*> ToCarry(Carry carry) const;
  // A request goes out with what ToCarry(carry) said.
  Request Open(Carry carry);
  // Its reply was taken, or never will be: what it carried is not under way any more. Again has no
  // effect.
  void Close(uint64_t number);
  // Of all that are open, as if their steps had failed.
  void CloseAll();

  Standing StandingOf(const Request& request, const Epoch& answered) const;
  // Whether the reply may be believed. An acknowledgement of what was never cut may not.
  Status Check(const Request& request, const Answer& answer) const;

  // The reply of a request says that all pushes up to this sequence are merged. Calls merged(push)
  // once for each.
  template <typename Merged>
  void Acknowledge(uint64_t number, uint64_t sequence,
                   const Merged& merged) HET_NO_THREAD_SAFETY_ANALYSIS {
    SendSkippedAgain(number, sequence);
    for (const Push& push : pushes_) {
      if (push.sequence > sequence) break;
      if (push.sequence > acknowledged_) merged(push);
    }
    if (sequence > acknowledged_) acknowledged_ = sequence;
    DropMerged();
  }

  // Calls visit(push) for the pushes after a sequence, oldest first. Those merged meanwhile are
  // still there as long as a reply may come that does not acknowledge them.
  template <typename Visit>
  void ForEachPushAfter(uint64_t sequence, const Visit& visit) const HET_NO_THREAD_SAFETY_ANALYSIS {
    for (const Push& push : pushes_) {
      if (push.sequence > sequence) visit(push);
    }
  }

  // As a link that was just made, of another cache: replies to requests from before are old.
  void StartAnew() {
    pushes_.clear();
    open_.clear();
    epoch_ = Epoch();
    cut_ = acknowledged_ = 0;
    last_old_ = last_number_;
  }

  // Forgets all pushes; sequences begin anew in the epoch. Calls lost(push) for each that was not
  // acknowledged.
  template <typename Lost>
  void Restart(const Epoch& epoch, const Lost& lost) HET_NO_THREAD_SAFETY_ANALYSIS {
    for (const Push& push : pushes_) {
      if (push.sequence > acknowledged_) lost(push);
    }
    pushes_.clear();
    epoch_ = epoch;
    cut_ = acknowledged_ = 0;
  }

 private:
  // A push that overtook one before it was not merged. The one before may be under way for as long
  // as its step lives, so both are sent again.
  void SendSkippedAgain(uint64_t number, uint64_t acknowledged);
  void DropMerged();

  struct OpenRequest {
    Request request;
    uint64_t acknowledged;  // when it was cut; its reply acknowledges no less
    uint64_t last_carried;  // sequence; 0: it carried no push
  };

  Epoch epoch_;
  uint64_t cut_ = 0;           // the last sequence used
  uint64_t acknowledged_ = 0;  // the last sequence known to be merged
  std::deque<Push> pushes_;
  std::vector<OpenRequest> open_;
  uint64_t last_number_ = 0;
  uint64_t last_old_ = 0;  // the last request before StartAnew
};

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_LINK_LINK_H_
