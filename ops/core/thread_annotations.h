// Which lock guards a member, and which locks a function takes or needs. clang checks what these
// say (-Wthread-safety; tools/thread_safety.py); to other compilers they are nothing.
//
// What the analysis cannot follow is a lock that is moved, that is one of several in an array, or
// that the caller of a function object holds. Constructors and destructors are not checked.

#ifndef HET_TF_OPS_CORE_THREAD_ANNOTATIONS_H_
#define HET_TF_OPS_CORE_THREAD_ANNOTATIONS_H_

#ifdef __clang__
#define HET_THREAD_ANNOTATION(...) __attribute__((__VA_ARGS__))
#else
#define HET_THREAD_ANNOTATION(...)
#endif

// Classes: a lock, and a class that holds one for as long as it lives.
#define HET_CAPABILITY(name) HET_THREAD_ANNOTATION(capability(name))
#define HET_SCOPED_CAPABILITY HET_THREAD_ANNOTATION(scoped_lockable)

// Members.
#define HET_GUARDED_BY(lock) HET_THREAD_ANNOTATION(guarded_by(lock))

// Functions, and lambdas between parameters and body: locks that the caller holds; locks that the
// function takes or releases.
#define HET_REQUIRES(...) HET_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define HET_REQUIRES_SHARED(...) HET_THREAD_ANNOTATION(requires_shared_capability(__VA_ARGS__))
#define HET_ACQUIRE(...) HET_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define HET_ACQUIRE_SHARED(...) HET_THREAD_ANNOTATION(acquire_shared_capability(__VA_ARGS__))
#define HET_TRY_ACQUIRE(...) HET_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define HET_TRY_ACQUIRE_SHARED(...) \
  HET_THREAD_ANNOTATION(try_acquire_shared_capability(__VA_ARGS__))
#define HET_RELEASE(...) HET_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define HET_RELEASE_SHARED(...) HET_THREAD_ANNOTATION(release_shared_capability(__VA_ARGS__))

// The body is not checked. As for templates that call a function object whose own annotations name
// locks that the caller of the template holds.
#define HET_NO_THREAD_SAFETY_ANALYSIS HET_THREAD_ANNOTATION(no_thread_safety_analysis)

#endif  // HET_TF_OPS_CORE_THREAD_ANNOTATIONS_H_
