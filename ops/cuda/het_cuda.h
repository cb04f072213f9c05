// Embedding rows in a device's memory: C functions for what a training step does with them.
//
// All pointers are to device memory unless said otherwise, with the shape beside them; n is a
// number that the caller knows, num_... one that the device has computed. Everything runs on the
// caller's stream, and nothing waits for it or allocates: what a verb needs beside its arguments is
// scratch of its ..._scratch_bytes, which it is free to overwrite and which is not read again.
//
// Verbs of one batch may run beside those of another. A function returns 0 or a cudaError_t.

#ifndef HET_TF_OPS_CUDA_HET_CUDA_H_
#define HET_TF_OPS_CUDA_HET_CUDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void* HetStream;  // cudaStream_t

const char* het_error_string(int error);

// ---- A batch of ids and its unique keys

// The arrays are the caller's; het_unique writes them.
typedef struct {
  int64_t num_ids;     // n, at most 2^30 - 128
  int64_t* keys;       // (n): the first num_keys, in the order of their first occurrence
  int32_t* key_of;     // (n): which of the keys each id is
  int32_t* begin;      // (n + 1): key u occurs begin[u + 1] - begin[u] times,
  int32_t* positions;  // (n): at positions[begin[u]] < ... < positions[begin[u + 1] - 1]
  int32_t* num_keys;   // (1)
} HetBatch;

size_t het_unique_scratch_bytes(int64_t n);
int het_unique(const int64_t* ids,  // (n)
               const HetBatch* batch, void* scratch, HetStream stream);

// Each id's row: the first dim floats of rows[slots[u]], or of visitors[slots[u] - lines] where
// that is not negative.
int het_gather(const HetBatch* batch,
               const int32_t* slots,                           // (num_keys)
               const float* rows, int64_t stride,              // (lines, stride)
               int64_t lines,                                  //
               const float* visitors, int64_t visitor_stride,  // (visitors, visitor_stride)
               int32_t dim,                                    //
               float* out,                                     // (n, dim)
               HetStream stream);

// The ids of a batch in bags, each of which becomes one output: of its ids' rows times their
// weights the sum, scaled, or the largest, column by column. The arrays are the caller's.
typedef struct {
  int64_t num_bags;
  const int32_t* begin;   // (num_bags + 1): where each bag's ids begin
  const int32_t* bag_of;  // (n): of each id
  const float* scales;    // (num_bags): 1 where the largest is taken
  const float* weights;   // (n), or NULL: ones
  const int32_t* max_of;  // (num_bags): which of those whose largest is taken, or -1; NULL: none
  // Out, for gradients, where they are not NULL:
  float* kept;    // (num_keys, dim): the rows as they were pooled
  float* maxima;  // (bags in max_of, dim)
  float* counts;  // (bags in max_of, dim): how many ids have them
} HetBags;

// Each bag's output, of rows as het_gather finds them, summed in the order of its ids. Zeros where
// it has none. Where there is max_of, there are kept, maxima and counts.
int het_pool(const HetBatch* batch, const HetBags* bags,
             const int32_t* slots,                           // (num_keys)
             const float* rows, int64_t stride,              // (lines, stride)
             int64_t lines,                                  //
             const float* visitors, int64_t visitor_stride,  // (visitors, visitor_stride)
             int32_t dim,                                    //
             float* const* out,                              // (num_bags), each (dim)
             HetStream stream);

// The gradient of each key: the sum of its occurrences' gradients, which comes out the same every
// time, and in the order of its occurrences where these are no more than 256.
size_t het_segment_sum_scratch_bytes(int64_t n, int32_t dim);
int het_segment_sum(const HetBatch* batch,
                    const float* gradients,  // (n, dim)
                    int32_t dim,
                    float* sums,             // (n, dim): the first num_keys
                    float* squares,          // (n): the sum of each one's squares
                    int64_t* num_nonfinite,  // (1): keys for which that is not finite
                    void* scratch, HetStream stream);
// The same of ids that were pooled. Ids that share a maximum share its gradient.
int het_segment_sum_pooled(const HetBatch* batch, const HetBags* bags,
                           const float* const* gradients,  // (num_bags), each (dim)
                           int32_t dim, float* sums, float* squares, int64_t* num_nonfinite,
                           void* scratch, HetStream stream);

// ---- A store of rows
//
// The worker's cache of docs/protocol.md with its lines in device memory; messages, their
// acknowledgement and admission stay with the host. A slot below lines is a line: a key with its
// row, the record of its updates that no push holds yet, its clock (base) and its pins. A slot
// lines + v is the visitor v: a key that got no line (more keys than lines, or not worth one), of
// all steps under way that have it. Its row, which may have come without slots, is there until the
// last of them ends, and its gradients go up.
//
// A step:
//   het_unique, het_find, het_list                  what is missing, what is to be checked
//   (the host decides which misses are worth a line)
//   het_evict, het_list_evicted, het_list_victims, het_collect, het_read_lines, het_make
//                                                   lines for the misses
//   (the host asks the shards)
//   het_install, het_install_values                 of misses, and of rows beyond the read bound
//   het_find_late, het_gather, het_segment_sum, het_update
//   het_list_due, het_collect_gradients, het_collect, het_unpin
//
// The verbs of one store run one after the other (a stream, or events between streams). From
// het_find and het_evict on a step's lines are pinned, so steps may overlap; but no het_find may
// come between het_evict and het_make.

typedef struct HetStore HetStore;

enum { HET_LRU = 0, HET_LFU = 1 };
enum { HET_CLOCK_COUNT = 0, HET_CLOCK_LAMPORT = 1, HET_CLOCK_DRIFT = 2 };

typedef struct {
  int32_t dim;
  const char* optimizer;  // host: a spec of Optimizer::Parse
  int64_t lines;          // at least 1, at most 2^30; rounded up to whole buckets
  int32_t policy;         // HET_LRU or HET_LFU
  int32_t clock;          // HET_CLOCK_...
} HetStoreConfig;

typedef struct {
  int64_t lines;
  int32_t row_dim;           // value[dim], slots[row_dim - dim]
  int32_t row_stride;        // floats from one row to the next
  int32_t contribution_dim;  // of a push
  int64_t bytes;             // of device memory
  const float* rows;         // (lines, row_stride)
  const float* visitors;     // (visitors, row_stride): as of the last het_set_visitors
} HetStoreInfo;

// How much device memory a store takes. *bytes and message are host memory; message:
// (message_bytes), says what is wrong with a config, for which this returns cudaErrorInvalidValue.
int het_store_bytes(const HetStoreConfig* config, int64_t* bytes, char* message,
                    size_t message_bytes);
// memory: (bytes), aligned to 256, the caller's. *store is host memory. Waits for the device.
int het_store_create(const HetStoreConfig* config, void* memory, HetStore** store, char* message,
                     size_t message_bytes, HetStream stream);
// Frees what is on the host.
void het_store_destroy(HetStore* store);
void het_store_info(const HetStore* store, HetStoreInfo* info);

// Memory for visitors 0 to visitors - 1, no fewer than before: what the memory before it had is
// copied. memory: (bytes), aligned to 256, the caller's; bytes without it.
size_t het_visitors_bytes(const HetStore* store, int64_t visitors);
int het_set_visitors(HetStore* store, void* memory, int64_t visitors, HetStream stream);

// How many lines have a row.
int het_count_lines(HetStore* store,
                    int64_t* num_lines,  // (1): out
                    HetStream stream);

// Some of a batch's keys. The arrays are the caller's.
typedef struct {
  int32_t* index;  // (n): which of the keys
  int64_t* keys;   // (n)
  int64_t* bases;  // (n): clocks of their lines, as a check carries them, or of misses, once
                   // het_evict was there, of their visitors; -1: the row is still to come
  int32_t* num;    // (1)
} HetList;

// Some slots. The arrays are the caller's.
typedef struct {
  int32_t* slots;  // (n)
  int32_t* num;    // (1)
} HetSlots;

// Some of a table's shards.
typedef struct {
  int32_t num_shards;
  const uint8_t* marked;  // (num_shards): 1 for each of them
} HetShards;

// Numbers of a shard that are summed, so that not every thread waits for the same. (Not measured.)
enum { HET_SPREAD = 32 };

// Looks the keys up, pins their lines and counts them as used.
int het_find(HetStore* store, const HetBatch* batch,
             int32_t* slots,  // (n): out, the first num_keys; -1: a miss
             HetStream stream);

// Keys with a visitor that have a line by now, with its row, have its slot.
int het_find_late(HetStore* store, const HetBatch* batch,
                  int32_t* slots,  // (num_keys): in and out
                  HetStream stream);

// The batch's misses, and the others, but for rows that their shards watch.
size_t het_list_scratch_bytes(int64_t n);
int het_list(HetStore* store, const HetBatch* batch,
             const int32_t* slots,       // (num_keys)
             const HetShards* watching,  // whose watch counts; NULL: nobody's
             int32_t* spared,            // (num_shards, HET_SPREAD): out, how many are left out
             const HetList* misses, const HetList* checks, void* scratch, HetStream stream);

// How many ids the keys of both lists have whose row is still to come.
int het_count_missed_ids(const HetBatch* batch, const HetList* misses, const HetList* checks,
                         int64_t* num_ids,  // (1): out
                         HetStream stream);

// A key that has no line.
typedef struct {
  int32_t uses;     // how often it was asked for lately, at least 1; 0: it is to have no line
  int32_t visitor;  // if it gets none; that which it has, or one that no step has
} HetNewcomer;

// A slot for each miss, pinned: a line that is free or whose row is the least worth keeping of its
// bucket, unless that row was asked for more often lately than the key (HET_LRU: whatever it is),
// or its visitor. num_misses: of the list, as the host read it.
size_t het_evict_scratch_bytes(const HetStore* store, int64_t num_misses);
int het_evict(HetStore* store, const HetList* misses, int64_t num_misses,
              const HetNewcomer* newcomers,  // (num_misses)
              int32_t* slots,                // (num_keys): in and out
              int64_t* num_evicted,          // (1): out, the lines that were another key's
              void* scratch, HetStream stream);

// Those of the misses' lines whose old rows have updates that no push holds.
size_t het_list_victims_scratch_bytes(int64_t num_misses);
int het_list_victims(HetStore* store, const HetList* misses, int64_t num_misses,
                     const int32_t* slots,     // (num_keys)
                     const HetSlots* victims,  // (num_misses): out
                     void* scratch, HetStream stream);

// What each of the misses' lines had, for the host to remember.
int het_list_evicted(HetStore* store, const HetList* misses, int64_t num_misses,
                     const int32_t* slots,  // (num_keys)
                     int64_t* keys,         // (num_misses): out, of the rows that give way; or 0
                     float* uses,           // (num_misses): out, how often each was asked for
                                            // lately; 0: the line was free, or there is none
                     HetStream stream);

// What lines have, for whoever keeps it: rows with all own updates, and their clocks.
int het_read_lines(HetStore* store,
                   const int32_t* slots,  // (n): of lines that have a row, and are clean
                   int64_t n,
                   float* rows,     // (n, row_stride): out, 0 beyond row_dim
                   int64_t* bases,  // (n): out
                   HetStream stream);

// The misses' lines are theirs from here on. They have no row until one is installed; a line that
// got none is gone once nobody pins it. The line of a key that has a visitor stays as long as that.
int het_make(HetStore* store, const HetList* misses, int64_t num_misses,
             const HetNewcomer* newcomers,  // (num_misses)
             const int32_t* slots,          // (num_keys)
             HetStream stream);

// Rows that came, with all own updates that were pushed; those that were not are merged onto them.
// A row older than what its line or visitor knows is left out, and so is one without a slot. No
// shard watches their rows any more.
int het_install(HetStore* store,
                const int32_t* index,  // (n): which of the slots each row is of; NULL: its own
                const int32_t* slots,  // (num_keys); -1: none
                float* rows,           // (n, row_stride): overwritten
                const int64_t* bases,  // (n); -1: the shard has other rows now, so the row is for
                                       // those that pin its line, if they have seen none
                int64_t n, HetStream stream);
// Of rows that came without slots: where one with slots is there, it stays.
int het_install_values(HetStore* store, const int32_t* index, const int32_t* slots,
                       const float* values,  // (n, dim)
                       const int64_t* bases, int64_t n, HetStream stream);

// The shards watch the rows of checks from now on: those that came are installed after this.
int het_watch(HetStore* store,
              const int32_t* slots,  // (num_keys)
              const HetList* checks,
              int64_t most,  // what their number cannot exceed
              const HetShards* watching, HetStream stream);
// That shard watches nothing any more.
int het_unwatch(HetStore* store, int32_t shard, int32_t num_shards, HetStream stream);

// The lines of rows that came though no step asked for them, to be installed next. It does not
// count as use, and pins nothing.
int het_find_unasked(HetStore* store,
                     const int64_t* keys,   // (n)
                     const int64_t* bases,  // (n): as het_install's
                     int64_t n,             //
                     int32_t* slots,        // (n): out; -1: there is no line with a row
                     int64_t* num_found,    // (1): counted on
                     HetStream stream);

// Which keys of a shard lack rows: its mark.
enum { HET_LINES_WITHOUT_ROW = 1, HET_ALL_LINES = 2 };

// Keys of a step that lack rows. scratch: het_list_scratch_bytes(n).
int het_list_lacking(HetStore* store, const HetBatch* batch,
                     const int32_t* slots,  // (num_keys)
                     const HetShards* shards,
                     const HetList* lacking,  // out, without bases
                     void* scratch, HetStream stream);

// One update of each key whose row is there with its slots and whose gradient is finite. refuse_if:
// (1), or NULL: if it is not 0, no row is touched.
size_t het_update_scratch_bytes(const HetStore* store, int64_t n);
int het_update(HetStore* store, const HetBatch* batch,
               const int32_t* slots,  // (num_keys)
               const float* sums,     // (num_keys, dim)
               const float* squares,  // (num_keys)
               float learning_rate,   //
               const int64_t* refuse_if, void* scratch, HetStream stream);

// What must be pushed after the step's update: lines with write_bound or more (-1: no bound) in
// units of the clock. A line's only update goes up as its gradient, and so does a visitor's.
size_t het_list_due_scratch_bytes(int64_t n);
int het_list_due(HetStore* store, const HetBatch* batch,
                 const int32_t* slots,       // (num_keys)
                 const float* squares,       // (num_keys)
                 int64_t write_bound,        //
                 const HetSlots* gradients,  // (n): out, which of the keys
                 const HetSlots* lines,      // (n): out
                 void* scratch, HetStream stream);

// Every line that has updates.
size_t het_list_dirty_scratch_bytes(const HetStore* store);
int het_list_dirty(HetStore* store,
                   const HetSlots* lines,  // (lines): out
                   void* scratch, HetStream stream);

// The rows of a push, in the form in which they travel (PushRow, docs/protocol.md, 2). The
// arrays are the caller's.
typedef struct {
  int64_t* keys;     // (n)
  int32_t* updates;  // (n): of a contribution; of a gradient 1
  uint32_t* clocks;  // (n): lamport: the clock after the updates; drift: their length
  float* floats;     // (n, dim) gradients or (n, contribution_dim) contributions
} HetPush;

// Lines' contributions.
int het_collect(HetStore* store, const HetSlots* lines, int64_t most,  // what num cannot exceed
                const HetPush* push, HetStream stream);
// Keys' gradients.
int het_collect_gradients(HetStore* store, const HetBatch* batch,
                          const int32_t* slots,  // (num_keys)
                          const float* sums,     // (num_keys, dim)
                          const HetSlots* keys, int64_t most, const HetPush* push,
                          HetStream stream);

// What was collected is in a push: its lines are clean.
int het_clean(HetStore* store,
              const HetSlots* some,  // that were collected
              const int32_t* slots,  // (num_keys); or NULL: some are no keys, but slots
              int64_t most, HetStream stream);

// The step is over.
int het_unpin(HetStore* store, const HetBatch* batch,
              const int32_t* slots,  // (num_keys)
              HetStream stream);

// A shard has other rows now: its rows are forgotten, and with them what was not pushed. Steps that
// pin them may read what they saw until another comes; what they update goes up as a gradient.
int het_forget(HetStore* store, int32_t shard, int32_t num_shards,
               int64_t* updates_lost,  // (1): out
               HetStream stream);

#ifdef __cplusplus
}
#endif

#endif  // HET_TF_OPS_CUDA_HET_CUDA_H_
