#include "ops/core/link/link.h"

#include <algorithm>
#include <utility>

namespace het_tf {

void Link::AddPush(Push push) {
  pushes_.push_back(std::move(push));  // or, where memory is short, nothing was cut
  cut_ = pushes_.back().sequence;
}

std::vector<const Link::Push*> Link::ToCarry(Carry carry) const {
  std::vector<const Push*> carried;
  for (const Push& push : pushes_) {
    if (push.sequence <= acknowledged_) continue;
    if (carry == Carry::kAll || push.carrier == 0) carried.push_back(&push);
  }
  return carried;
}

Link::Request Link::Open(Carry carry) {
  open_.push_back({{last_number_ + 1, epoch_}, acknowledged_, 0});
  OpenRequest& open = open_.back();
  ++last_number_;
  for (Push& push : pushes_) {
    if (push.sequence > acknowledged_ && (carry == Carry::kAll || push.carrier == 0)) {
      push.carrier = open.request.number;
      open.last_carried = push.sequence;
    }
  }
  return open.request;
}

void Link::Close(uint64_t number) {
  const auto open = std::find_if(open_.begin(), open_.end(), [&](const OpenRequest& each) {
    return each.request.number == number;
  });
  if (open == open_.end()) return;
  open_.erase(open);
  for (Push& push : pushes_) {
    if (push.carrier == number) push.carrier = 0;
  }
  DropMerged();
}

void Link::CloseAll() {
  while (!open_.empty()) Close(open_.back().request.number);
}

void Link::SendSkippedAgain(uint64_t number, uint64_t acknowledged) {
  for (const OpenRequest& open : open_) {
    if (open.request.number != number || open.request.epoch != epoch_) continue;
    if (open.last_carried <= acknowledged) continue;
    for (Push& push : pushes_) {
      if (push.sequence > acknowledged) push.carrier = 0;
    }
  }
}

Link::Standing Link::StandingOf(const Request& request, const Epoch& answered) const {
  if (request.number <= last_old_) return Standing::kOld;
  if (answered == epoch_) return Standing::kCurrent;
  return request.epoch == epoch_ ? Standing::kNew : Standing::kOld;
}

Status Link::Check(const Request& request, const Answer& answer) const {
  if (answer.epoch.incarnation == 0 || answer.epoch.session == 0) {
    return InvalidArgument("reply has incarnation = ", answer.epoch.incarnation,
                           ", session = ", answer.epoch.session);
  }
  const Standing standing = StandingOf(request, answer.epoch);
  if (standing == Standing::kOld) return Status();
  const uint64_t cut = standing == Standing::kCurrent ? cut_ : 0;
  if (answer.acknowledged > cut) {
    return InvalidArgument("reply acknowledges push ", answer.acknowledged, ", the last cut is ",
                           cut);
  }
  return Status();
}

void Link::DropMerged() {
  uint64_t dispensable = acknowledged_;
  for (const OpenRequest& open : open_) {
    // One of an earlier epoch may be answered in this one, before anything was merged.
    const uint64_t acknowledged = open.request.epoch == epoch_ ? open.acknowledged : 0;
    dispensable = std::min(dispensable, acknowledged);
  }
  while (!pushes_.empty() && pushes_.front().sequence <= dispensable) pushes_.pop_front();
}

}  // namespace het_tf
