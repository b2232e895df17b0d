#include "libs/checkpoint/make_internal.h"

namespace conclave::make {

// The turns, tags and rules of MiniMax-M2's conversation format, in words of our own: one leading system
// turn; thinking kept only after the last user turn; consecutive tool results in one turn; the answer begins
// inside <think>.
const char* const kChatTemplate =
    R"jinja({#- Conversation format of a checkpoint made by `conclave model make`. -#}
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {%- if part is string -%}{{- part -}}
      {%- elif part.type == 'text' -%}{{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro tool_lines(tools) -%}
  {%- for tool in tools -%}
    {{- '<tool>' ~ ((tool.function if tool.function is defined else tool) | tojson(ensure_ascii=False)) ~ '</tool>\n' -}}
  {%- endfor -%}
{%- endmacro -%}
{%- set lead = namespace(system=none, rest=messages) -%}
{%- if messages and messages[0].role == 'system' -%}
  {%- set lead.system = messages[0] -%}
  {%- set lead.rest = messages[1:] -%}
{%- endif -%}
{%- set last_user = namespace(index=-1) -%}
{%- for message in lead.rest -%}
  {%- if message.role == 'user' -%}{%- set last_user.index = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- ']~!b[' ~ ']~b]system\n' -}}
{%- if lead.system is not none and lead.system.content -%}
  {{- text_of(lead.system.content) -}}
{%- else -%}
  {{- model_identity if model_identity is defined else 'You are a small test model with random weights.' -}}
{%- endif -%}
{%- if lead.system is not none and lead.system.current_date -%}
  {{- '\nCurrent date: ' ~ lead.system.current_date -}}
{%- endif -%}
{%- if lead.system is not none and lead.system.current_location -%}
  {{- '\nCurrent location: ' ~ lead.system.current_location -}}
{%- endif -%}
{%- if tools -%}
  {{- '\n\n# Tools\nThese tools can be called; each is described by a JSON schema:\n\n<tools>\n' -}}
  {{- tool_lines(tools) -}}
  {{- '</tools>\n\nA call is written as XML, with one invoke element for each tool:\n\n' -}}
  {{- '<minimax:tool_call>\n<invoke name="a-tool">\n<parameter name="a-key">a value</parameter>\n</invoke>\n</minimax:tool_call>' -}}
{%- endif -%}
{{- '[e~[\n' -}}
{%- set calls = namespace(open=false) -%}
{%- for message in lead.rest -%}
  {%- if message.role == 'user' -%}
    {{- ']~b]user\n' ~ text_of(message.content) ~ '[e~[\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set turn = namespace(thought='', said=text_of(message.content)) -%}
    {%- if message.reasoning_content is string -%}
      {%- set turn.thought = message.reasoning_content -%}
    {%- elif '</think>' in turn.said -%}
      {%- set turn.thought = turn.said.split('</think>')[0].strip('\n').split('<think>')[-1].strip('\n') -%}
      {%- set turn.said = turn.said.split('</think>')[-1].strip('\n') -%}
    {%- endif -%}
    {{- ']~b]ai\n' -}}
    {%- if turn.thought and loop.index0 > last_user.index -%}
      {{- '<think>\n' ~ turn.thought ~ '\n</think>\n\n' -}}
    {%- endif -%}
    {{- turn.said -}}
    {%- set calls.open = false -%}
    {%- if message.tool_calls -%}
      {%- set calls.open = true -%}
      {{- '\n<minimax:tool_call>\n' -}}
      {%- for call in message.tool_calls -%}
        {%- set body = call.function if call.function else call -%}
        {{- '<invoke name="' ~ body.name ~ '">\n' -}}
        {%- for key, value in body.arguments.items() -%}
          {{- '<parameter name="' ~ key ~ '">' -}}
          {{- value if value is string else value | tojson(ensure_ascii=False) -}}
          {{- '</parameter>\n' -}}
        {%- endfor -%}
        {{- '</invoke>\n' -}}
      {%- endfor -%}
      {{- '</minimax:tool_call>' -}}
    {%- endif -%}
    {{- '[e~[\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if not calls.open -%}
      {{- raise_exception('A tool message needs an assistant message with a tool call before it.') -}}
    {%- endif -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- ']~b]tool' -}}{%- endif -%}
    {%- if message.content is string -%}
      {{- '\n<response>' ~ message.content ~ '</response>' -}}
    {%- else -%}
      {%- for part in message.content -%}
        {{- '\n<response>' ~ (part.output if part.output is defined else part.text if part.text is defined else part) ~ '\n</response>' -}}
      {%- endfor -%}
    {%- endif -%}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '[e~[\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- ']~b]ai\n<think>\n' -}}
{%- endif -%}
)jinja";

}  // namespace conclave::make
