// Finds out which tasks of a cluster answer, and cuts the connections to those that hang.
//
// A call to a process that was stopped, or whose host vanished, waits until something closes its
// connection. TensorFlow makes some such calls with the lock of Python's interpreter held (to add a
// function to all tasks, or to remove one). Nothing of Python runs then. So whether tasks answer is
// found out here, by threads that need no interpreter.

#ifndef HET_TF_OPS_CORE_GUARD_GUARD_H_
#define HET_TF_OPS_CORE_GUARD_GUARD_H_

#include <memory>
#include <string>
#include <vector>

namespace het_tf {

// In the order of het_tf.distribute.failures.probes.TaskState.
enum class TaskState : int {
  kUp,
  kRefused,      // its process is gone
  kSilent,       // the kernel accepts connections for it, but it says nothing
  kUnreachable,  // its host does not answer, or has no address
};

// What comes back within so many seconds when HTTP/2 is begun with "host:port".
TaskState Probe(const std::string& address, double timeout);

// Shuts down every connection of this process to "host:port", those of probes left out: calls over
// them fail. Returns how many there are.
int CutConnections(const std::string& address);

// Asks some tasks again and again, each in a thread of its own. One that has been silent or out of
// reach for long has its connections cut, as long as it stays so.
class Guard {
 public:
  struct Config {
    double lost_after;  // seconds since the last answer
    double interval;    // seconds between two questions
    double timeout;     // seconds that an answer may take, or a quarter, once lost_after is over
  };

  struct Found {
    TaskState state;
    double silent;  // seconds since it was last up, or since the guard began
  };

  Guard(const std::vector<std::string>& addresses, const Config& config);
  // Returns at once. What was asked last is still waited for, and does nothing then.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  // Of each task, by the order of their addresses. Before the first answer it is up.
  std::vector<Found> found() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace het_tf

// For ctypes, which calls without the interpreter's lock. addresses: "host:port", one a line.
extern "C" {
__attribute__((visibility("default"))) int het_guard_probe(const char* address, double timeout);
__attribute__((visibility("default"))) void* het_guard_start(const char* addresses,
                                                             double lost_after, double interval,
                                                             double timeout);
// states, silent: out, of each task.
__attribute__((visibility("default"))) void het_guard_found(void* guard, int* states,
                                                            double* silent);
__attribute__((visibility("default"))) void het_guard_stop(void* guard);
}

#endif  // HET_TF_OPS_CORE_GUARD_GUARD_H_
