// Cuts of the rows that changed since an earlier cut.

#include <algorithm>
#include <new>
#include <utility>

#include "ops/core/memory/hash.h"
#include "ops/core/table/record.h"
#include "ops/core/table/snapshot.h"
#include "ops/core/table/table.h"

namespace het_tf {

// Whoever changes a row has locked its stripe and cannot fail any more.
void Table::Bits::Set(uint32_t slot) {
  try {
    if (slot / 64 >= words.size()) words.resize(slot / 64 + 1);
    words[slot / 64] |= uint64_t{1} << slot % 64;
  } catch (const std::bad_alloc&) {
    complete = false;
  }
}

void Table::Bits::Drop(int64_t key, size_t most) {
  if (!complete) return;
  try {
    if (dropped.size() < most) return dropped.push_back(key);
  } catch (const std::bad_alloc&) {
  }
  complete = false;
  std::vector<int64_t>().swap(dropped);
}

void Table::Bits::Add(const Bits& other) {
  words.resize(std::max(words.size(), other.words.size()));
  for (size_t w = 0; w < other.words.size(); ++w) words[w] |= other.words[w];
  dropped.insert(dropped.end(), other.dropped.begin(), other.dropped.end());
  complete = complete && other.complete;
}

Status Table::CutChanged(const std::string& name, uint64_t since,
                         std::unique_ptr<Snapshot>* snapshot, uint64_t* number, bool* whole) {
  // Alone, so that no request is merged by half.
  const WriterLock contents(&contents_);
  try {
    if (readers_.count(name) == 0) {
      for (const auto& stripe : stripes_) stripe->changed.reserve(readers_.size() + 1);
      const size_t place = readers_.size();
      readers_[name].place = place;
      for (const auto& stripe : stripes_) stripe->changed.emplace_back();
    }
    Reader& reader = readers_[name];
    const bool has_last = since != 0 && since == reader.number;
    const bool lost_last = since != 0 && since == reader.before && !reader.whole;
    *whole = !has_last && !lost_last;
    std::vector<Bits> taken;
    std::vector<std::vector<uint64_t>> unread;
    std::vector<int64_t> dropped, returned;
    for (size_t s = 0; s < stripes_.size() && !*whole; ++s) {
      taken.push_back(stripes_[s]->changed[reader.place]);
      if (lost_last) taken[s].Add(reader.taken[s]);
      unread.push_back(taken[s].words);
      // Each once.
      std::vector<int64_t>& keys = taken[s].dropped;
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      for (const int64_t key : keys) {
        const bool has_row = Find(*stripes_[s], HashKey(key), key) != Index::kNone;
        (has_row ? returned : dropped).push_back(key);
      }
      *whole = !taken[s].complete;
    }
    if (*whole) {
      taken.clear();
      unread.clear();
      dropped.clear();
      returned.clear();
      for (const auto& stripe : stripes_) unread.push_back(Unread::AllOf(stripe->records.end()));
    }
    HET_RETURN_IF_ERROR(CutBits(std::move(unread), snapshot));
    std::sort(returned.begin(), returned.end());
    (*snapshot)->dropped_.swap(dropped);
    (*snapshot)->returned_.swap(returned);
    for (const auto& stripe : stripes_) stripe->changed[reader.place] = Bits();
    reader.taken.swap(taken);
    reader.whole = *whole;
    reader.before = since;
    // Never one that another table gave out.
    reader.number = *number = RandomId();
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory for a snapshot");
  }
  return Status();
}

void Table::Forget(const std::string& name) {
  const WriterLock contents(&contents_);
  const auto found = readers_.find(name);
  if (found == readers_.end()) return;
  const size_t place = found->second.place;
  readers_.erase(found);
  for (auto& [other, reader] : readers_) reader.place -= reader.place > place;
  for (const auto& stripe : stripes_) stripe->changed.erase(stripe->changed.begin() + place);
}

}  // namespace het_tf
