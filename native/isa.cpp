#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <sstream>
#include <string>

#include "argument_error.h"

namespace bifolio {
namespace {

// BIFOLIO_MASK_ISA=avx512,amx: run as on a machine that lacks these. The generic kernels cannot be masked.
bool is_masked(const std::string& name) {
  const char* list = std::getenv("BIFOLIO_MASK_ISA");
  std::stringstream names(list ? list : "");
  for (std::string each; std::getline(names, each, ',');)
    if (each == name) return true;
  return false;
}

std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> tables = {&kGenericKernels};
#ifdef BIFOLIO_SOFTWARE_TILES
  tables.push_back(&kTileKernels);
#endif
#if defined(__aarch64__)
  tables.push_back(&kNeonKernels);
#elif defined(__x86_64__)
  tables.insert(tables.end(), {&kAvx2Kernels, &kAvx512Kernels, &kAmxKernels});
#endif
  std::erase_if(tables, [](const KernelTable* table) {
    return table->score() == 0 || (table != &kGenericKernels && is_masked(table->name));
  });
  std::sort(tables.begin(), tables.end(), [](auto* a, auto* b) { return a->score() > b->score(); });
  return tables;
}

const KernelTable* find_table(const std::string& name) {
  const auto tables = usable_tables();
  if (name.empty()) return tables.front();
  std::string names;
  for (const KernelTable* table : tables) {
    if (name == table->name) return table;
    names += names.empty() ? table->name : std::string(", ") + table->name;
  }
  throw ArgumentError("this machine has no instruction set " + name + ": choose one of " + names);
}

std::atomic<const KernelTable*>& chosen() {
  static std::atomic<const KernelTable*> table{find_table("")};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *chosen().load(std::memory_order_relaxed); }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : usable_tables()) names.emplace_back(table->name);
  return names;
}

void set_isa(const std::string& name) { chosen().store(find_table(name)); }

}  // namespace bifolio
