// Which conversation format a checkpoint speaks.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/text/chat_template.h"
#include "libs/text/conversation/tool_call_parser.h"
#include "libs/text/token_decoder.h"
#include "libs/text/tokenizer.h"

namespace conclave::text {

struct ConversationFormat {
  ToolFormat tools = ToolFormat::kNone;
  bool reasons = false;  // the model thinks between think_open and think_close
  std::string think_open = "<think>";
  std::string think_close = "</think>";
};

// Reads it off the template's text and the tokenizer's added tokens (`tokenizer` may be null): the names of
// the tags. A model without either tag has plain content.
ConversationFormat detect_format(const TemplateSource& source, const Tokenizer* tokenizer);

// The tags of a format, as the model writes them.
std::vector<std::string> format_tags(const ConversationFormat& format);

// Text of the tokens, with special tokens left out but for the format's own tags. The tokenizer must outlive
// it.
std::unique_ptr<TokenDecoder> make_token_decoder(const Tokenizer& tokenizer, const ConversationFormat& format,
                                                 bool skip_special = true);

}  // namespace conclave::text
