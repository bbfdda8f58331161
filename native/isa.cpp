#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace bifolio {
namespace {

std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> tables = {&kGenericKernels};
#if defined(__aarch64__)
  tables.push_back(&kNeonKernels);
#elif defined(__x86_64__)
  tables.insert(tables.end(), {&kAvx2Kernels, &kAvx512Kernels, &kAmxKernels});
#endif
  std::erase_if(tables, [](const KernelTable* table) { return table->score() == 0; });
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
  throw std::invalid_argument("this machine has no instruction set " + name + ": choose one of " + names);
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
