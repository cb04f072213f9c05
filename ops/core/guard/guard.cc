#include "ops/core/guard/guard.h"

#include <dirent.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <thread>

#include "ops/core/mutex.h"

namespace het_tf {
namespace {

using Clock = std::chrono::steady_clock;

// What a client says first: the preface and a SETTINGS frame without settings (RFC 9113, 3.4).
constexpr char kBegins[] =
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    "\0\0\0\4\0\0\0\0";  // and the 0 that ends the literal

std::chrono::duration<double> Seconds(double seconds) {
  return std::chrono::duration<double>(seconds);
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }

 private:
  const int number_;
};

// The sockets of probes that are under way.
class ProbeSockets {
 public:
  static ProbeSockets* Get() {
    static auto* sockets = new ProbeSockets();  // threads may outlive what is destroyed at the end
    return sockets;
  }

  int Open(int family) {
    MutexLock lock(&mutex_);
    const int number = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (number >= 0) numbers_.insert(number);
    return number;
  }
  void Close(int number) {
    MutexLock lock(&mutex_);
    numbers_.erase(number);
    close(number);
  }
  // A copy of a descriptor, which stays the file that it is; -1: it is one of these, or none.
  int CopyOther(int number) {
    MutexLock lock(&mutex_);
    return numbers_.count(number) > 0 ? -1 : fcntl(number, F_DUPFD_CLOEXEC, 0);
  }

 private:
  Mutex mutex_;
  std::set<int> numbers_ HET_GUARDED_BY(mutex_);
};

// Where "host:port" is, by its name; empty where it has no address now.
class Addresses {
 public:
  explicit Addresses(std::string address) {
    constexpr char kScheme[] = "grpc://";
    if (address.rfind(kScheme, 0) == 0) address.erase(0, sizeof(kScheme) - 1);
    const size_t colon = address.rfind(':');
    if (colon == std::string::npos) return;
    std::string host = address.substr(0, colon);
    host.erase(
        std::remove_if(host.begin(), host.end(), [](char c) { return c == '[' || c == ']'; }),
        host.end());
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found_) != 0) {
      found_ = nullptr;
    }
  }
  ~Addresses() {
    if (found_ != nullptr) freeaddrinfo(found_);
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  // Calls visit(address) until it returns true; whether it did.
  template <typename Visit>
  bool Any(const Visit& visit) const {
    for (const addrinfo* each = found_; each != nullptr; each = each->ai_next) {
      if (visit(*each)) return true;
    }
    return false;
  }

 private:
  addrinfo* found_ = nullptr;
};

// Waits for an event of poll(2). False: not until then.
bool WaitFor(int descriptor, short event, Clock::time_point until) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    pollfd polled = {descriptor, event, 0};
    const int events = poll(&polled, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (events >= 0 || errno != EINTR) return events > 0;
  }
}

TaskState OfError(int error) {
  const bool refused = error == ECONNREFUSED || error == ECONNRESET || error == EPIPE;
  return refused ? TaskState::kRefused : TaskState::kUnreachable;
}

// As Probe, of a socket that is not connected yet.
TaskState ProbeOver(int connection, const addrinfo& address, Clock::time_point until) {
  if (connect(connection, address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return OfError(errno);
    if (!WaitFor(connection, POLLOUT, until)) return TaskState::kUnreachable;
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(connection, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return OfError(error);
  }
  send(connection, kBegins, sizeof(kBegins), MSG_NOSIGNAL);
  if (!WaitFor(connection, POLLIN, until)) return TaskState::kSilent;
  char byte;
  return recv(connection, &byte, 1, 0) > 0 ? TaskState::kUp : TaskState::kRefused;
}

// Whether a socket is connected to that address, of IPv4 or IPv6.
bool IsSame(const sockaddr_storage& peer, const addrinfo& address) {
  const auto port_of = [](const void* any) {
    return static_cast<const sockaddr*>(any)->sa_family == AF_INET
               ? static_cast<const sockaddr_in*>(any)->sin_port
               : static_cast<const sockaddr_in6*>(any)->sin6_port;
  };
  // IPv4 as IPv6 has it.
  const auto host_of = [](const void* any) {
    in6_addr host = {};
    if (static_cast<const sockaddr*>(any)->sa_family == AF_INET6) {
      host = static_cast<const sockaddr_in6*>(any)->sin6_addr;
    } else {
      host.s6_addr[10] = host.s6_addr[11] = 0xff;
      std::memcpy(host.s6_addr + 12, &static_cast<const sockaddr_in*>(any)->sin_addr, 4);
    }
    return host;
  };
  if (peer.ss_family != AF_INET && peer.ss_family != AF_INET6) return false;
  if (address.ai_family != AF_INET && address.ai_family != AF_INET6) return false;
  const in6_addr one = host_of(&peer), other = host_of(address.ai_addr);
  return port_of(&peer) == port_of(address.ai_addr) && std::memcmp(&one, &other, sizeof(one)) == 0;
}

}  // namespace

TaskState Probe(const std::string& address, double timeout) {
  constexpr double kLongest = 1e6;  // what milliseconds of poll(2) have room for
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        Seconds(std::min(timeout, kLongest)));
  TaskState state = TaskState::kUnreachable;
  // Of several addresses, as localhost has them, the first that is not refused.
  Addresses(address).Any([&](const addrinfo& each) {
    const int connection = ProbeSockets::Get()->Open(each.ai_family);
    if (connection < 0) return false;
    state = ProbeOver(connection, each, until);
    ProbeSockets::Get()->Close(connection);
    return state == TaskState::kUp || state == TaskState::kSilent;
  });
  return state;
}

int CutConnections(const std::string& address) {
  const Addresses peers(address);
  int cut = 0;
  DIR* const open = opendir("/proc/self/fd");
  if (open == nullptr) return 0;
  while (const dirent* entry = readdir(open)) {
    if (entry->d_name[0] == '.') continue;
    const Descriptor copy(ProbeSockets::Get()->CopyOther(std::atoi(entry->d_name)));
    sockaddr_storage peer;
    socklen_t size = sizeof(peer);
    if (copy.get() < 0) continue;
    if (getpeername(copy.get(), reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    if (!peers.Any([&](const addrinfo& each) { return IsSame(peer, each); })) continue;
    shutdown(copy.get(), SHUT_RDWR);
    ++cut;
  }
  closedir(open);
  return cut;
}

struct Guard::State {
  struct Task {
    TaskState state = TaskState::kUp;
    Clock::time_point up = Clock::now();
  };

  Mutex mutex;
  CondVar changed;
  bool ended HET_GUARDED_BY(mutex) = false;
  std::vector<Task> tasks HET_GUARDED_BY(mutex);

  // Whether it ended within so many seconds.
  bool EndsWithin(double seconds) {
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
    MutexLock lock(&mutex);
    while (!ended && changed.WaitUntil(&mutex, until)) {
    }
    return ended;
  }

  // For how long a task was not up. asked: when what was found of it was asked.
  double Note(size_t task, TaskState found, Clock::time_point asked) {
    MutexLock lock(&mutex);
    tasks[task].state = found;
    if (found == TaskState::kUp) tasks[task].up = asked;
    return SecondsSince(tasks[task].up);
  }

  static double SecondsSince(Clock::time_point time) {
    return std::chrono::duration<double>(Clock::now() - time).count();
  }
};

Guard::Guard(const std::vector<std::string>& addresses, const Config& config)
    : state_(std::make_shared<State>()) {
  state_->tasks.resize(addresses.size());
  for (size_t i = 0; i < addresses.size(); ++i) {
    std::thread([i, address = addresses[i], config, state = state_] {
      double silent = 0;
      while (!state->EndsWithin(config.interval)) {
        const auto asked = Clock::now();
        // So that who is lost is cut off then, and not only after a whole timeout more.
        const double left = config.lost_after - silent - config.interval;
        const double timeout = std::clamp(left, config.timeout / 4, config.timeout);
        const TaskState found = Probe(address, timeout);
        if (state->EndsWithin(0)) return;
        silent = state->Note(i, found, asked);
        const bool hangs = found == TaskState::kSilent || found == TaskState::kUnreachable;
        if (hangs && silent >= config.lost_after) CutConnections(address);
      }
    }).detach();
  }
}

std::vector<Guard::Found> Guard::found() const {
  MutexLock lock(&state_->mutex);
  std::vector<Found> found;
  for (const State::Task& task : state_->tasks) {
    found.push_back({task.state, State::SecondsSince(task.up)});
  }
  return found;
}

Guard::~Guard() {
  MutexLock lock(&state_->mutex);
  state_->ended = true;
  state_->changed.NotifyAll();
}

}  // namespace het_tf

int het_guard_probe(const char* address, double timeout) {
  return static_cast<int>(het_tf::Probe(address, timeout));
}

void* het_guard_start(const char* addresses, double lost_after, double interval, double timeout) {
  std::vector<std::string> each;
  std::istringstream lines(addresses);
  for (std::string line; std::getline(lines, line);) each.push_back(line);
  return new het_tf::Guard(each, {lost_after, interval, timeout});
}

void het_guard_found(void* guard, int* states, double* silent) {
  for (const het_tf::Guard::Found& found : static_cast<het_tf::Guard*>(guard)->found()) {
    *states++ = static_cast<int>(found.state);
    *silent++ = found.silent;
  }
}

void het_guard_stop(void* guard) { delete static_cast<het_tf::Guard*>(guard); }
