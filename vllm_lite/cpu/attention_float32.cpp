// Attention (`attention.h`) with queries and a cache in float32.
#include "attention.h"

EXPORT(decode_float32, decode<float>)
EXPORT(merge_decode_float32, merge_decode<float>)
EXPORT(prefill_float32, prefill<float>)
