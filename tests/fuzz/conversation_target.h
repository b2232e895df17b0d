// What is done with hostile model outputs, tool schemas and histories; shared by the seeded loop and
// libFuzzer. Each aborts when a promise is broken.
#pragma once

#include <cstdint>
#include <string_view>

namespace conclave::fuzz {

// Parses a model's output in one go and in pieces (sizes drawn from `cuts`), with and without reasoning in
// front: the results are equal, calls come in order, and the arguments of complete ones are JSON objects.
// `options`: the format, whether the prompt opened the reasoning, how the output ended, and so on.
void try_output(std::string_view text, uint8_t options, uint64_t cuts);
// Brings `value`, as text and as JSON, to `schema`: JSON comes out, and a declared string is the text itself.
// Returns whether the schema was accepted.
bool try_coercion(std::string_view schema, std::string_view value);
// Normalizes "messages" for the templates that `options` describes: JSON comes out, or an error that names a
// member. Returns whether they were accepted.
bool try_history(std::string_view messages, uint8_t options);

}  // namespace conclave::fuzz
