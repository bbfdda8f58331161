#include "adapters.h"

#include <algorithm>

#include "isa.h"

namespace bifolio {
namespace {

constexpr int64_t kMostProducts = 1 << 15;  // floats of a piece of work between the product and the sum

// The rows of one run and one part, and the places of its pieces of work among those of all.
struct Task {
  const LowRank* part;
  int64_t first, count;
  float* hidden;  // [count][r, rounded up to whole panels]
  int64_t begin;  // of its pieces
  size_t wave;    // parts that change the same columns are added one after the other
};

// Some panels of a matrix as one of its own.
PackedMatrix panels_of(const PackedMatrix& matrix, int64_t begin, int64_t end) {
  PackedMatrix part = matrix;
  part.data = matrix.panel(begin), part.num_panels = end - begin;
  part.n = std::min(matrix.n, end * kPanel) - begin * kPanel;
  return part;
}

Activations activations(const float* x, int64_t stride, int64_t count, int64_t k) {
  return {x, stride, count, k, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
}

int64_t hidden_width(const LowRank& part) { return round_up(part.down.n, kPanel); }

// Asks for one of `count` equal shares of a matrix, which the second product reads soon.
void prefetch(const PackedMatrix& matrix, int64_t share, int64_t count) {
  const uint8_t* begin = matrix.panel(matrix.num_panels * share / count);
  const uint8_t* end = matrix.panel(matrix.num_panels * (share + 1) / count);
  for (; begin < end; begin += 64) __builtin_prefetch(begin, 0, 2);
}

// Panels of `up` in one piece of work.
int64_t up_panels(const Task& task) { return std::max<int64_t>(1, std::min<int64_t>(64, kMostProducts / (task.count * kPanel))); }

// Calls body(task, piece of it) for all pieces of all tasks, shared by all threads; pieces_of(task) is their number.
template <class PiecesOf, class Body>
void each_piece(Member& m, std::vector<Task>& tasks, PiecesOf pieces_of, Body body) {
  int64_t total = 0;
  for (Task& task : tasks) task.begin = total, total += pieces_of(task);
  m.split(total, 1, [&](int64_t begin, int64_t end) {
    auto task = std::upper_bound(tasks.begin(), tasks.end(), begin, [](int64_t at, const Task& each) { return at < each.begin; }) - 1;
    for (int64_t at = begin; at < end; ++at) {
      while (task + 1 != tasks.end() && (task + 1)->begin <= at) ++task;
      body(*task, at - task->begin);
    }
  });
}

std::vector<Task> make_tasks(const std::vector<AdaptedRows>& runs, Scratch& memory) {
  std::vector<Task> tasks;
  size_t size = 0;
  for (const AdaptedRows& run : runs)
    for (const LowRank& part : *run.parts) {
      if (part.whole) continue;
      tasks.push_back({&part, run.first, run.count, nullptr, 0, part.wave});
      size += size_t(run.count * hidden_width(part));
    }
  float* hidden = memory.array<float>(size);
  for (Task& task : tasks) task.hidden = hidden, hidden += task.count * hidden_width(*task.part);
  return tasks;
}

}  // namespace

void set_waves(std::vector<LowRank>& parts) {
  const auto end_of = [](const LowRank& part) { return part.column + part.outputs(); };
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].wave = 0;
    for (size_t j = 0; j < i; ++j)
      if (parts[j].column < end_of(parts[i]) && parts[i].column < end_of(parts[j])) parts[i].wave = std::max(parts[i].wave, parts[j].wave + 1);
  }
}

void replace_rows(Member& m, Rows y, Rows x, const std::vector<AdaptedRows>& runs, Workspace& workspace) {
  for (const AdaptedRows& run : runs)
    for (const LowRank& part : *run.parts)
      if (part.whole)
        linear(m, {x.row(run.first), run.count, x.width, x.stride}, *part.whole, {y.row(run.first), run.count, y.width, y.stride}, workspace);
}

void change_embedding(float* row, int64_t token_id, const std::vector<TableChange>& changes, float scale, Scratch& memory) {
  for (const TableChange& change : changes) {
    const int64_t width = change.down.data ? change.down.width : change.rows.width;
    float* sums = memory.array<float>(size_t(width + change.rows.width));
    float* own = change.down.data ? sums + width : row;
    dequantize_row(change.rows.format, change.rows.data + size_t(token_id) * change.rows.row_bytes, change.rows.width, own);
    if (!change.down.data) {
      for (int64_t i = 0; i < width; ++i) row[i] *= scale;
      continue;
    }
    std::fill(sums, sums + width, 0.0f);
    for (int64_t r = 0; r < change.rows.width; ++r) {
      const auto* down = reinterpret_cast<const float*>(change.down.data + size_t(r) * change.down.row_bytes);
      for (int64_t i = 0; i < width; ++i) sums[i] += own[r] * down[i];
    }
    for (int64_t i = 0; i < width; ++i) row[i] += scale * sums[i];
  }
}

void adapt(Member& m, Rows y, Rows x, const std::vector<AdaptedRows>& runs, Workspace& workspace) {
  if (runs.empty()) return;
  replace_rows(m, y, x, runs, workspace);
  const KernelTable& isa = kernels();
  std::vector<Task> tasks = make_tasks(runs, workspace.low_rank);
  each_piece(m, tasks, [](const Task& task) { return task.part->down.num_panels; }, [&](const Task& task, int64_t panel) {
    const PackedMatrix& down = task.part->down;
    prefetch(task.part->up, panel, down.num_panels);
    isa.matmul(down, activations(x.row(task.first), x.stride, task.count, down.k), nullptr, task.hidden, hidden_width(*task.part), panel,
               panel + 1, m.scratch().bytes(matmul_scratch_bytes()));
  });
  const auto pieces_of = [](const Task& task) {
    const int64_t most = up_panels(task);
    return (task.part->up.num_panels + most - 1) / most;
  };
  const auto add_piece = [&](const Task& task, int64_t piece) {
    const PackedMatrix& up = task.part->up;
    const int64_t most = up_panels(task), begin = piece * most, end = std::min(begin + most, up.num_panels);
    const PackedMatrix part = panels_of(up, begin, end);
    const int64_t width = (end - begin) * kPanel, column = begin * kPanel;
    uint8_t* scratch = m.scratch().bytes(matmul_scratch_bytes() + size_t(task.count * width) * sizeof(float));
    auto* products = reinterpret_cast<float*>(scratch + matmul_scratch_bytes());
    const float* bias = task.part->bias ? task.part->bias + column : nullptr;
    isa.matmul(part, activations(task.hidden, hidden_width(*task.part), task.count, up.k), bias, products, width, 0, part.num_panels, scratch);
    for (int64_t row = 0; row < task.count; ++row) {
      float* target = y.row(task.first + row) + task.part->column + column;
      isa.add_row(target, products + row * width, part.n, target);
    }
  };
  for (size_t wave = 0; !tasks.empty(); ++wave) {
    const auto later = std::stable_partition(tasks.begin(), tasks.end(), [=](const Task& task) { return task.wave == wave; });
    std::vector<Task> present(tasks.begin(), later);
    tasks.erase(tasks.begin(), later);
    each_piece(m, present, pieces_of, add_piece);
  }
}

}  // namespace bifolio
