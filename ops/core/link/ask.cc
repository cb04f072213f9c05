#include "ops/core/link/ask.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace het_tf {

RequestBytes Asker::Send(int shard, Link::Carry carry, int64_t read_bound, const Queries& queries,
                         NewPush* push, const AllocateRequest& allocate, Link* link,
                         Watching* watching, Asked* asked) const {
  const std::vector<const Link::Push*> again = link->ToCarry(carry);
  const bool waits = carry == Link::Carry::kAwaited && link->acknowledged() < link->cut();
  const bool asks = !queries.keys.empty() || queries.num_spared > 0;
  if (again.empty() && push == nullptr && !asks && !waits) {
    allocate(shard, 0);
    return RequestBytes();
  }
  RequestHeader header;
  header.flags = half ? kHalf : 0;
  header.cache_id = cache_id;
  header.incarnation = link->epoch().incarnation;
  header.session = link->epoch().session;
  header.cut = link->cut() + (push != nullptr ? 1 : 0);
  header.read_bound = read_bound;
  header.watch = queries.watches ? watching->epoch() : 0;
  header.seen = queries.watches ? watching->seen() : 0;
  header.dim = static_cast<uint32_t>(optimizer->dim());
  header.slot_dim = static_cast<uint32_t>(optimizer->slot_dim());
  header.contribution_dim = static_cast<uint32_t>(optimizer->contribution_dim());
  header.shard = static_cast<uint32_t>(shard);
  header.num_pushes = static_cast<uint32_t>(again.size() + (push != nullptr ? 1 : 0));
  header.num_checks = queries.num_checks;
  header.num_value_checks = queries.num_value_checks;
  header.num_full = queries.num_full;
  header.num_values =
      static_cast<uint32_t>(queries.keys.size() - header.num_bases()) - queries.num_full;
  for (const int64_t base : queries.bases) {
    header.base_bytes += static_cast<uint32_t>(BaseBytes(base));
  }
  const KeyPacking packing = KeyPacking::Of(queries.keys);
  header.lowest_key = packing.lowest;
  header.key_bytes = packing.key_bytes;
  RequestBytes bytes;
  const size_t new_bytes =
      push == nullptr ? 0 : PushBytes(push->header, format(), header.contribution_dim);
  bytes.pushes = new_bytes;
  for (const Link::Push* each : again) bytes.pushes += each->size;
  bytes.all = RequestWriter::Size(header, bytes.pushes);

  const std::shared_ptr<char> memory = allocate(shard, bytes.all);
  RequestWriter writer(memory.get(), header);
  for (const Link::Push* each : again) {
    std::memcpy(writer.AddPush(each->size), each->bytes, each->size);
  }
  if (push != nullptr) {
    Link::Push cut;
    cut.sequence = push->header.sequence;
    cut.memory = memory;
    cut.size = new_bytes;
    cut.updates = push->updates;
    cut.rows = std::move(push->rows);
    char* written = writer.AddPush(new_bytes);
    cut.bytes = written;
    push->write(written);
    link->AddPush(std::move(cut));
  }
  writer.AddKeys(queries.keys);
  for (const int64_t base : queries.bases) writer.AddBase(base);
  writer.Finish();

  asked->request = link->Open(carry);
  asked->awaited = carry == Link::Carry::kAwaited ? header.cut : 0;
  asked->num_queries = header.num_queries();
  asked->num_checks = header.num_checks;
  asked->num_value_checks = header.num_value_checks;
  asked->num_full = header.num_full;
  asked->watch = header.watch;
  if (header.watch != 0) watching->Open();
  asked->num_spared = queries.num_spared;
  return bytes;
}

Status Asker::Read(const Asked& asked, const ReplyBytes& bytes, ReplyView* reply) const {
  HET_RETURN_IF_ERROR(ReplyView::Parse(bytes.data, bytes.size, reply));
  const ReplyHeader& header = reply->header;
  if (header.num_queries != asked.num_queries || static_cast<int>(header.dim) != optimizer->dim() ||
      static_cast<int>(header.slot_dim) != optimizer->slot_dim()) {
    return InvalidArgument("reply answers ", header.num_queries, " queries with rows of dim ",
                           header.dim, " and slot_dim ", header.slot_dim, ", not ",
                           asked.num_queries, " with ", optimizer->dim(), " and ",
                           optimizer->slot_dim());
  }
  if (header.format().half != half) {
    return InvalidArgument("reply has ", half ? "floats" : "bfloat16",
                           ", which were not asked for");
  }
  if (asked.watch == 0 && (header.number != 0 || header.num_unasked > 0)) {
    return InvalidArgument("reply has number = ", header.number,
                           ", num_unasked = ", header.num_unasked, " where nothing is watched");
  }
  for (int64_t r = 0; r < header.num_values; ++r) {
    const int64_t query = reply->value_rows[r].query;
    if (query >= asked.first_value()) break;
    if (query >= asked.num_checks && query < asked.num_bases()) continue;
    return InvalidArgument("reply answers query ", query, " with a value; it asks for the row");
  }
  return Status();
}

bool TakeReplyHeader(const ReplyHeader& reply, Link::Standing standing, Asked* asked,
                     Watching* watching) {
  asked->overtook = standing == Link::Standing::kCurrent && reply.acknowledged < asked->awaited;
  asked->restarted = (reply.flags & kRestarted) != 0;
  asked->unwatched = !asked->restarted && asked->watch != 0 && reply.number == 0;
  if (asked->watch == watching->epoch() && reply.number != 0) {
    return watching->Take(reply.number) && (reply.flags & kWatches) != 0;
  }
  watching->GiveUp(asked->watch);
  return false;
}

Status CheckUnasked(const ReplyView& reply, int shard, int num_shards) {
  std::vector<int64_t> keys(reply.header.num_unasked);
  for (size_t r = 0; r < keys.size(); ++r) {
    keys[r] = reply.unasked_rows[r].query;
    if (ShardOfHash(HashKey(keys[r]), num_shards) == static_cast<uint32_t>(shard)) continue;
    return InvalidArgument("a row of key ", keys[r], " is of another shard");
  }
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end()) return InvalidArgument("the row of key ", *twice, " came twice");
  return Status();
}

}  // namespace het_tf
