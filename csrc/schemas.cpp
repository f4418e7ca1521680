// Which operators this library was built for. Python looks for these words in the file before it loads it
// (ops/backends/library.py): kernels of other schemas would read their arguments wrongly.
extern "C" __attribute__((visibility("default"), used)) const char leannorm_schemas[] =
    "leannorm schemas " LEANNORM_SCHEMAS;
