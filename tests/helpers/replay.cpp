// Runs recorded calls of the kernels, a file each, and writes what they left in memory over what was there before.
// replay.py writes the files. A call's struct is passed on as bytes: its fields need not be known here.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
const char* torchcaps_instructions();
int torchcaps_run(int64_t operation, int64_t bytes, const void* problem);
int torchcaps_routing_pool(int64_t bytes, const void* problem);
}

namespace {

struct Header {
  int64_t operation;  // -1: the routing pool
  int64_t bytes;      // of a number
  int64_t size;       // of the struct, whose last pointer is a function
  int64_t tensors;
};
struct Place {
  int64_t position;  // of the pointer in the struct
  int64_t bytes;
};

void check(bool fine, const char* path, const char* what) {
  if (fine) return;
  fprintf(stderr, "%s: %s\n", path, what);
  exit(1);
}

int go_on() { return 0; }

void replay(const char* path) {
  FILE* file = fopen(path, "r+b");
  check(file, path, "cannot be opened");
  auto read = [&](void* x, size_t bytes) { check(fread(x, 1, bytes, file) == bytes, path, "is too short"); };
  Header header;
  read(&header, sizeof(header));
  std::vector<Place> places(header.tensors);
  read(places.data(), places.size() * sizeof(Place));
  std::vector<char> problem(header.size);
  read(problem.data(), problem.size());
  const long start = ftell(file);

  std::vector<std::vector<char>> tensors;
  for (const Place& place : places) {
    tensors.emplace_back(place.bytes);
    read(tensors.back().data(), place.bytes);
    const void* address = tensors.back().data();
    memcpy(&problem[place.position], &address, sizeof(address));
  }
  int (*const interrupted)() = go_on;
  memcpy(&problem[header.size - sizeof(interrupted)], &interrupted, sizeof(interrupted));

  const int status = header.operation < 0 ? torchcaps_routing_pool(header.bytes, problem.data())
                                          : torchcaps_run(header.operation, header.bytes, problem.data());
  check(status == 0, path, "the kernel gave up");
  fseek(file, start, SEEK_SET);
  for (const auto& x : tensors) check(fwrite(x.data(), 1, x.size(), file) == x.size(), path, "cannot be written");
  check(fclose(file) == 0, path, "cannot be written");
}

}  // namespace

int main(int count, char** paths) {
  for (int i = 1; i < count; i++) replay(paths[i]);
  printf("%d calls with the instruction set %s\n", count - 1, torchcaps_instructions());
}
