// A cache's side of an exchange with a shard: the request with its queries and the pushes that
// travel along, and whether a reply fits it. What the queries are about is the cache's to know.

#ifndef HET_TF_OPS_CORE_LINK_ASK_H_
#define HET_TF_OPS_CORE_LINK_ASK_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ops/core/link/link.h"
#include "ops/core/link/watch.h"
#include "ops/core/memory/hash.h"
#include "ops/core/row/optimizer.h"
#include "ops/core/status.h"
#include "ops/core/wire/reply.h"
#include "ops/core/wire/request.h"

namespace het_tf {

// Provides the memory of the request to a shard, aligned to 8; 0 bytes: there is none this time.
// The cache keeps it until what it pushes is merged.
using AllocateRequest = std::function<std::shared_ptr<char>(int shard, size_t bytes)>;

struct ReplyBytes {
  const char* data;  // aligned to 8
  size_t size;
};

// What a request asks, in the order of RequestHeader's counts.
struct Queries {
  std::vector<int64_t> keys;
  std::vector<int64_t> bases;                                   // (num_checks + num_value_checks)
  uint32_t num_checks = 0, num_value_checks = 0, num_full = 0;  // the other keys: values
  bool watches = false;    // the step counts on the shard's watch
  int64_t num_spared = 0;  // watched rows that are not checked: the shard must be heard
};

// A push that is cut with a request.
struct NewPush {
  PushHeader header;
  int64_t updates;
  std::vector<Link::Row> rows;             // Link::Push's
  std::function<void(char* bytes)> write;  // bytes: (PushBytes(...)), aligned to 8
};

// A request that went out, and how many of its queries are what.
struct Asked {
  Link::Request request;  // number 0: there was nothing to say
  int64_t num_queries = 0;
  int64_t num_checks = 0;
  int64_t num_value_checks = 0;
  int64_t num_full = 0;
  uint64_t watch = 0;
  int64_t num_spared = 0;  // rows of the step that it does not ask about
  bool restarted = false;  // it was answered by a shard that has other rows
  bool unwatched = false;  // or by one that has the rows, and no longer watches them
  uint64_t awaited = 0;    // the last push that the reply should acknowledge
  bool overtook = false;   // it does not: the request came before another one, which has that push

  int64_t num_bases() const { return num_checks + num_value_checks; }
  int64_t first_value() const { return num_bases() + num_full; }
  // What the step did not ask about, since the shard watched it, it has to ask for.
  bool lacks_rows() const { return (restarted || unwatched) && num_spared > 0; }
};

// Bytes of a request.
struct RequestBytes {
  size_t all = 0;
  size_t pushes = 0;  // the part of them that pushes take
};

// Writes a request and opens it on the link; none where there is nothing to say.
struct Asker {
  uint64_t cache_id;
  const Optimizer* optimizer;
  bool half;  // values travel as bfloat16

  RowFormat format() const { return {optimizer->dim(), half}; }

  // push: nullptr if nothing is cut. asked: out.
  RequestBytes Send(int shard, Link::Carry carry, int64_t read_bound, const Queries& queries,
                    NewPush* push, const AllocateRequest& allocate, Link* link, Watching* watching,
                    Asked* asked) const;

  // Reads a shard's reply to a request that went out.
  Status Read(const Asked& asked, const ReplyBytes& bytes, ReplyView* reply) const;
};

// Takes what the reply to a request says of the shard, of its pushes and of its watch. standing: of
// the reply, not kOld. Returns whether the shard watches the rows of checks without an answer from
// now on.
bool TakeReplyHeader(const ReplyHeader& reply, Link::Standing standing, Asked* asked,
                     Watching* watching);

// (shards): of the rows of each shard, as it last said. shards: (shards), each with a link.
template <typename ShardType>
std::vector<uint64_t> IncarnationsOf(const std::vector<ShardType>& shards) {
  std::vector<uint64_t> incarnations;
  for (const ShardType& shard : shards) incarnations.push_back(shard.link.epoch().incarnation);
  return incarnations;
}

// A request whose ticket ended without its reply.
struct UnansweredRequest {
  size_t shard;
  uint64_t number, watch;
};
// Those of a ticket. AskedType: an Asked.
template <typename AskedType>
void AddUnanswered(const std::vector<AskedType>& asked, std::vector<UnansweredRequest>* requests) {
  for (size_t s = 0; s < asked.size(); ++s) {
    const uint64_t number = asked[s].request.number;
    if (number != 0) requests->push_back({s, number, asked[s].watch});
  }
}

// What is carried by a request that follows so many of its kind which overtook what they wait for.
// That is on its way as a rule, so it is sent again only after some round trips.
inline Link::Carry CarryAfter(int overtaken) {
  return overtaken <= 2 ? Link::Carry::kAwaited : Link::Carry::kAll;
}

// Whether the rows that nobody asked for, each of them once, are of the shard that sends them.
Status CheckUnasked(const ReplyView& reply, int shard, int num_shards);

// Reads the replies to all requests of a step, of which asked (shards) knows, without believing
// them yet. AskedType: an Asked. views: out, of requests that went out.
template <typename AskedType>
Status ReadReplies(const Asker& asker, const std::vector<AskedType>& asked,
                   const std::vector<ReplyBytes>& replies, std::vector<ReplyView>* views) {
  if (replies.size() != asked.size()) {
    return InvalidArgument("replies holds ", replies.size(), " messages for ", asked.size(),
                           " shards");
  }
  views->resize(replies.size());
  for (size_t s = 0; s < replies.size(); ++s) {
    if (asked[s].request.number == 0) continue;
    const Status read = asker.Read(asked[s], replies[s], &(*views)[s]);
    if (!read.ok()) return InvalidArgument("replies[", s, "]: ", read.message());
  }
  return Status();
}

// Whether the links of all shards, and their keys, believe the replies. shards: (shards), each with
// a link.
template <typename AskedType, typename ShardType>
Status CheckReplies(const std::vector<AskedType>& asked, const std::vector<ReplyView>& views,
                    const std::vector<ShardType>& shards) {
  for (size_t s = 0; s < asked.size(); ++s) {
    if (asked[s].request.number == 0) continue;
    const ReplyHeader& header = views[s].header;
    const Status believed = shards[s].link.Check(
        asked[s].request, {{header.incarnation, header.session}, header.acknowledged});
    if (!believed.ok()) return InvalidArgument("replies[", s, "]: ", believed.message());
    const Status unasked =
        CheckUnasked(views[s], static_cast<int>(s), static_cast<int>(asked.size()));
    if (!unasked.ok()) return InvalidArgument("replies[", s, "]: ", unasked.message());
  }
  return Status();
}

}  // namespace het_tf

#endif  // HET_TF_OPS_CORE_LINK_ASK_H_
