// Attention (`attention.h`) with queries and a cache in bfloat16.
#include "attention.h"

EXPORT(decode_bfloat16, decode<bf16>)
EXPORT(merge_decode_bfloat16, merge_decode<bf16>)
EXPORT(prefill_bfloat16, prefill<bf16>)
