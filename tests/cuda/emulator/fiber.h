// Stacks that one OS thread switches between by hand. x86-64 with the System V calling convention only.
#pragma once

#if !defined(__x86_64__)
#error "the emulator switches stacks in x86-64 assembly; other processors need a port of fiber.h"
#endif

#include <cstddef>

namespace emulator {

using StackPointer = void*;

// Saves the callee-saved registers on the running stack and its pointer in *from, then goes on where `to` was left.
extern "C" void emulator_switch_stack(StackPointer* from, StackPointer to);
asm(R"(
.text
.globl emulator_switch_stack
.hidden emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// A stack below `top` (aligned to 16) that starts with `entry`, which never returns.
inline StackPointer new_stack(char* top, void (*entry)()) {
  constexpr int NUM_SAVED_REGISTERS = 6;
  void** pointer = reinterpret_cast<void**>(top);
  *--pointer = nullptr;  // the return address of entry; it keeps the stack aligned as after a call
  *--pointer = reinterpret_cast<void*>(entry);
  return pointer - NUM_SAVED_REGISTERS;
}

}  // namespace emulator
