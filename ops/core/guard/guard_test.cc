#include "ops/core/guard/guard.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

namespace het_tf {
namespace {

// Listens, and does nothing else: as a process that was stopped.
class Stopped {
 public:
  Stopped() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(socket_, 8), 0);
    socklen_t size = sizeof(address);
    getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
  }
  ~Stopped() { close(socket_); }

  std::string address() const { return "localhost:" + std::to_string(port_); }

  // A connection to it; of IPv6 as gRPC makes them of addresses of IPv4.
  int Connect(bool as_ipv6 = false) const {
    const int connection = socket(as_ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port_);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sockaddr_in6 mapped = {};
    mapped.sin6_family = AF_INET6;
    mapped.sin6_port = htons(port_);
    inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr);
    const int failed =
        as_ipv6 ? connect(connection, reinterpret_cast<sockaddr*>(&mapped), sizeof(mapped))
                : connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    EXPECT_EQ(failed, 0);
    return connection;
  }
  int Accept() const { return accept(socket_, nullptr, nullptr); }

 private:
  const int socket_;
  uint16_t port_ = 0;
};

TEST(GuardTest, AProbeSaysWhatCameBack) {
  const Stopped stopped;
  EXPECT_EQ(Probe(stopped.address(), 0.2), TaskState::kSilent);
  close(stopped.Accept());
  for (const bool speaks : {true, false}) {
    std::thread listens([&] {
      const int connection = stopped.Accept();
      if (speaks) send(connection, "x", 1, 0);
      close(connection);
    });
    EXPECT_EQ(Probe(stopped.address(), 60), speaks ? TaskState::kUp : TaskState::kRefused);
    listens.join();
  }
  std::string address;
  {
    address = Stopped().address();
  }
  EXPECT_EQ(Probe(address, 60), TaskState::kRefused);
  EXPECT_EQ(Probe("no-such-host.invalid:1", 60), TaskState::kUnreachable);
  EXPECT_EQ(Probe("no address", 60), TaskState::kUnreachable);
}

TEST(GuardTest, AProbeIsNotCut) {
  const Stopped stopped;
  std::thread cuts([&] {
    const int connection = stopped.Accept();
    EXPECT_EQ(CutConnections(stopped.address()), 0);
    send(connection, "x", 1, 0);
    close(connection);
  });
  EXPECT_EQ(Probe(stopped.address(), 60), TaskState::kUp);
  cuts.join();
}

TEST(GuardTest, ConnectionsToOneAddressAreCut) {
  const Stopped one, other;
  const int cut = one.Connect(), mapped = one.Connect(/*as_ipv6=*/true), kept = other.Connect();
  int pair[2];  // connected, and without an address
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  EXPECT_EQ(CutConnections("grpc://" + one.address()), 2);
  char byte = 'x';
  EXPECT_EQ(recv(cut, &byte, 1, 0), 0);
  EXPECT_EQ(recv(mapped, &byte, 1, 0), 0);
  const int peer = other.Accept();
  EXPECT_EQ(send(peer, &byte, 1, 0), 1);
  EXPECT_EQ(recv(kept, &byte, 1, 0), 1);
  EXPECT_EQ(CutConnections("no-such-host.invalid:1"), 0);
  for (const int each : {cut, mapped, kept, peer, pair[0], pair[1]}) close(each);
}

TEST(GuardTest, WhoDoesNotAnswerForLongIsCutOffUntilTheGuardEnds) {
  const Stopped stopped;
  char byte;
  {
    const Guard guard({"no-such-host.invalid:1", stopped.address()}, {0.05, 0.01, 0.05});
    for (int i = 0; i < 2; ++i) {
      const int connection = stopped.Connect();
      EXPECT_EQ(recv(connection, &byte, 1, 0), 0);
      close(connection);
    }
    const Guard::Found found = guard.found()[1];
    EXPECT_EQ(found.state, TaskState::kSilent);
    EXPECT_GE(found.silent, 0.05);
  }
  const int connection = stopped.Connect();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(recv(connection, &byte, 1, MSG_DONTWAIT), -1) << "nothing is cut any longer";
  close(connection);
}

}  // namespace
}  // namespace het_tf
