// Text of one sequence, token by token, behind an interface.
#pragma once

#include <memory>
#include <string>

#include "libs/base/ids.h"

namespace conclave::text {

// For one stream; not thread-safe. Never half a character.
class TokenDecoder {
 public:
  virtual ~TokenDecoder() = default;
  // Appends what the tokens so far decide.
  virtual void push(TokenId token, std::string& out) = 0;
  // Ends the text: an unfinished character becomes U+FFFD.
  virtual void flush(std::string& out) = 0;
};

}  // namespace conclave::text
