// specstep::rank on the CPU: see reference.py.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <stdexcept>
#include <tuple>

#include "../noise.h"
#include "../tensor.h"

namespace specstep {
namespace {

constexpr float SHARPNESS = 0.5f, STEPS_PER_NAT = 4096, LEAST_REST = 1e-6f;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Whether a log-probability is that of a candidate.
bool there(float log_prob) { return log_prob > NONE && log_prob < -NONE; }

// The logarithm of the sum of exp over candidates and what is left over.
float log_sum(const std::vector<float>& scores, float rest) {
  float greatest = rest, total = 0;
  for (const float score : scores) greatest = std::max(greatest, score);
  for (const float score : scores) total += std::exp(score - greatest);
  return greatest + std::log(total + std::exp(rest - greatest));
}

// Scores of a sampled row's candidates, in place of their log-probabilities.
void score(const int64_t* tokens, std::vector<float>& log_q, float temperature, const Noise& noise) {
  float sum = 0;
  for (const float each : log_q) sum += std::exp(each);
  const float rest = std::log(std::max(1 - sum, LEAST_REST)) / temperature;
  std::vector<float> plain = log_q, noisy = log_q;
  for (size_t i = 0; i < log_q.size(); i++) {
    plain[i] = log_q[i] / temperature;
    noisy[i] = (plain[i] + noise(static_cast<uint32_t>(tokens[i]))) / SHARPNESS;
  }
  const float all = log_sum(plain, rest), all_noisy = log_sum(noisy, rest / SHARPNESS);
  for (size_t i = 0; i < log_q.size(); i++)
    log_q[i] = std::nearbyint((plain[i] - all + noisy[i] - all_noisy) / 2 * STEPS_PER_NAT) / STEPS_PER_NAT;
}

void best(const int64_t* tokens, std::vector<float>& scores, int64_t top_k, int64_t* chosen, float* score) {
  for (int64_t place = 0; place < top_k; place++) {
    const auto greatest = std::max_element(scores.begin(), scores.end());  // the first among equals
    const bool found = greatest != scores.end() && *greatest > NONE;
    chosen[place] = found ? tokens[greatest - scores.begin()] : 0;
    score[place] = found ? *greatest : NONE;
    if (found) *greatest = NONE;
  }
}

std::tuple<Tensor, Tensor> rank(const Tensor& tokens, const Tensor& log_probs, const Tensor& temperature,
                                const Tensor& seeds, const Tensor& positions, int64_t top_k) {
  const Tensor held[] = {dense(tokens), dense(log_probs), dense(temperature), dense(seeds), dense(positions)};
  if (tokens.dim() != 3 || log_probs.dim() != 3 || log_probs.scalar_type() != ScalarType::Float)
    throw std::invalid_argument("specstep::rank: expected tokens [B, F, C] int64 and log_probs [B, F, C] float32");
  const int64_t batch = tokens.size(0), width = tokens.size(1), count = tokens.size(2);
  Tensor chosen = empty({batch, width, top_k}, aoti_torch_dtype_int64());
  Tensor scores = empty({batch, width, top_k}, aoti_torch_dtype_float32());
  std::vector<float> log_q(count);
  for (int64_t row = 0; row < batch; row++) {
    const float warmth = static_cast<const float*>(held[2].data_ptr())[row];
    const Noise noise(static_cast<const int64_t*>(held[3].data_ptr())[row],
                      static_cast<const int64_t*>(held[4].data_ptr())[row]);
    for (int64_t node = row * width; node < (row + 1) * width; node++) {
      const int64_t* names = static_cast<const int64_t*>(held[0].data_ptr()) + node * count;
      const float* given = static_cast<const float*>(held[1].data_ptr()) + node * count;
      for (int64_t i = 0; i < count; i++) {
        log_q[i] = there(given[i]) ? given[i] : NONE;
        for (int64_t j = 0; j < i; j++)
          if (names[j] == names[i] && there(given[j])) log_q[i] = NONE;
      }
      if (warmth > 0) score(names, log_q, warmth, noise);
      best(names, log_q, top_k, static_cast<int64_t*>(chosen.data_ptr()) + node * top_k,
           static_cast<float*>(scores.data_ptr()) + node * top_k);
    }
  }
  return {chosen, scores};
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_rank_native(
    AtenTensorHandle tokens, AtenTensorHandle log_probs, AtenTensorHandle temperature, AtenTensorHandle seeds,
    AtenTensorHandle positions, int64_t top_k, AtenTensorHandle* chosen, AtenTensorHandle* scores) {
  using namespace specstep;
  return guarded("rank", [&] {
    const auto [best, score] = rank(borrowed(tokens), borrowed(log_probs), borrowed(temperature), borrowed(seeds),
                                    borrowed(positions), top_k);
    const AOTITorchError error = aoti_torch_new_tensor_handle(best.get(), chosen);
    return error ? error : aoti_torch_new_tensor_handle(score.get(), scores);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "rank_native(Tensor tokens, Tensor log_probs, Tensor temperature, Tensor seeds, Tensor positions, int top_k) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("rank_native", TORCH_BOX(&specstep::rank));
}
