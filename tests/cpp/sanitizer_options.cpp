// What the sanitizers are told, compiled into each instrumented test so that it holds however the test is started. Nothing is suppressed:
// an entry that hides a finding needs its reason here. Options in the environment (ASAN_OPTIONS, TSAN_OPTIONS) still win.

extern "C" {

const char* __asan_default_options();
const char* __asan_default_options() { return "detect_stack_use_after_return=1:strict_string_checks=1"; }

// torch's own code is not instrumented, so its atomics order nothing here, but its calls of memcpy and memset would be looked at: each
// parallel tensor operation is then a false race. Their accesses are ignored; locks and threads inside torch are still followed.
const char* __tsan_default_options();
const char* __tsan_default_options() { return "ignore_interceptors_accesses=1"; }

}  // extern "C"
