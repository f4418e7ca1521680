// A library that is built on a new Linux runs on an old one only if it needs nothing that the old one lacks. What it
// would need is defined here, where the linker looks first; tests/test_wheel.py says which versions remain.
#include <sstream>

#define LEANNORM_OURS extern "C" __attribute__((visibility("hidden")))

#if defined(__GLIBC__)
// glibc 2.32: whether there is only one thread. std::shared_ptr asks, and counts without atomics if so. This answers
// no.
LEANNORM_OURS char __libc_single_threaded = 0;

// glibc 2.29: `exp` that does not set errno. The old one returns the same values.
#if defined(__x86_64__)
__asm__(".symver leannorm_first_exp, exp@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver leannorm_first_exp, exp@GLIBC_2.17");
#endif
#if defined(__x86_64__) || defined(__aarch64__)
extern "C" double leannorm_first_exp(double);
LEANNORM_OURS double leannorm_exp(double x) __asm__("exp");
double leannorm_exp(double x) { return leannorm_first_exp(x); }
#endif
#endif

#if defined(__GLIBCXX__)
// libstdc++ of GCC 9: constructors without arguments, which torch's error messages call.
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();
#endif
