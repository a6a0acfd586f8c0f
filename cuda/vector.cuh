// Runs of elements that are read and written in one instruction.
#pragma once

// WIDTH elements of T that lie at a multiple of their own size; a power of two, 16 bytes at most.
template <class T, int WIDTH>
struct alignas(WIDTH * sizeof(T)) Vector {
  T at[WIDTH];
};

template <int WIDTH, class T>
__device__ inline Vector<T, WIDTH> load(const T* from) {
  return *reinterpret_cast<const Vector<T, WIDTH>*>(from);
}

template <class T, int WIDTH>
__device__ inline void store(T* to, const Vector<T, WIDTH>& vector) {
  *reinterpret_cast<Vector<T, WIDTH>*>(to) = vector;
}
