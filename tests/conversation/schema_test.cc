#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "libs/text/conversation/json_text.h"
#include "libs/text/conversation/parameter_schema.h"
#include "libs/text/conversation/tool_set.h"

namespace conclave::text {
namespace {

std::string from_text(const std::string& schema, const std::string& text) {
  const boost::json::value root = boost::json::parse(schema);
  const ParameterSchema view(&root, &root);
  const std::string out = view.coerce_text(text);
  EXPECT_TRUE(read_json(out).has_value()) << out;
  // What may be streamed as a string is one.
  const bool is_string = view.text_form() == ParameterSchema::TextForm::kString ||
                         (view.text_form() == ParameterSchema::TextForm::kStringOrNull && out != "null");
  EXPECT_TRUE(!is_string || out == json_quoted(text)) << out;
  return out;
}

std::string from_json(const std::string& schema, const std::string& json) {
  const boost::json::value root = boost::json::parse(schema);
  const std::string out = ParameterSchema(&root, &root).coerce_json(*read_json(json));
  EXPECT_TRUE(read_json(out).has_value()) << out;
  return out;
}

TEST(Schema, PlainTypes) {
  const std::string string = R"({"type":"string"})";
  for (const char* text : {"", "3", "null", " x \n", "true", "{\"a\":1}", "\"quoted\""}) {
    EXPECT_EQ(from_text(string, text), json_quoted(text));
    EXPECT_EQ(from_text("{}", text), json_quoted(text));
    EXPECT_EQ(from_text(R"({"description":"anything"})", text), json_quoted(text));
    EXPECT_EQ(from_text(R"({"type":"no such type"})", text), json_quoted(text));
  }
  const std::string integer = R"({"type":"integer"})";
  EXPECT_EQ(from_text(integer, "3"), "3");
  EXPECT_EQ(from_text(integer, "\n -12 "), "-12");
  EXPECT_EQ(from_text(integer, "+007"), "7");
  EXPECT_EQ(from_text(integer, "3.0"), "3");
  EXPECT_EQ(from_text(integer, "123456789012345678901234567890"), "123456789012345678901234567890");
  EXPECT_EQ(from_text(integer, "3.5"), "\"3.5\"");
  EXPECT_EQ(from_text(integer, "three"), "\"three\"");
  EXPECT_EQ(from_text(integer, "null"), "\"null\"");
  EXPECT_EQ(from_text(integer, ""), "\"\"");
  const std::string number = R"({"type":"number"})";
  EXPECT_EQ(from_text(number, "1.50"), "1.50");
  EXPECT_EQ(from_text(number, "3"), "3");
  EXPECT_EQ(from_text(number, ".5"), "0.5");
  EXPECT_EQ(from_text(number, "1e5"), "1e5");
  EXPECT_EQ(from_text(number, "NaN"), "\"NaN\"");
  const std::string boolean = R"({"type":"boolean"})";
  for (const char* text : {"true", "True", "1", "yes", "on"}) EXPECT_EQ(from_text(boolean, text), "true");
  for (const char* text : {"false", "FALSE", "0", "no", "off"}) EXPECT_EQ(from_text(boolean, text), "false");
  EXPECT_EQ(from_text(boolean, "2"), "\"2\"");
  EXPECT_EQ(from_text(R"({"type":"object"})", " {\"a\":[1,2.50]} "), "{\"a\": [1, 2.50]}");
  EXPECT_EQ(from_text(R"({"type":"object"})", "[1]"), "\"[1]\"");
  EXPECT_EQ(from_text(R"({"type":"object"})", "{'a':1}"), "\"{'a':1}\"");
  EXPECT_EQ(from_text(R"({"type":"array"})", "[1,\"x\"]"), "[1, \"x\"]");
  EXPECT_EQ(from_text(R"({"type":"null"})", "NULL"), "null");
}

TEST(Schema, SeveralTypes) {
  EXPECT_EQ(from_text(R"({"type":["string","null"]})", "null"), "null");
  EXPECT_EQ(from_text(R"({"type":["string","null"]})", "Null"), "null");
  EXPECT_EQ(from_text(R"({"type":["string","null"]})", "none"), "\"none\"");
  EXPECT_EQ(from_text(R"({"type":"string","nullable":true})", "null"), "null");
  EXPECT_EQ(from_text(R"({"type":["integer","null"]})", "5"), "5");
  EXPECT_EQ(from_text(R"({"type":["integer","string"]})", "5"), "5");
  EXPECT_EQ(from_text(R"({"type":["integer","string"]})", "007"), "\"007\"");  // a code, not a number
  EXPECT_EQ(from_text(R"({"type":["boolean","string"]})", "yes"), "\"yes\"");
  EXPECT_EQ(from_text(R"({"type":["boolean","integer"]})", "1"), "1");
  EXPECT_EQ(from_text(R"({"anyOf":[{"type":"integer"},{"type":"null"}]})", "null"), "null");
  EXPECT_EQ(from_text(R"({"oneOf":[{"type":"boolean"},{"type":"array"}]})", "[true]"), "[true]");
  EXPECT_EQ(from_text(R"({"allOf":[{"type":["string","integer"]},{"type":"integer"}]})", "9"), "9");
  EXPECT_EQ(from_text(R"({"anyOf":[{"type":"string"},{"type":"string","format":"date"}]})", "7"), "\"7\"");
}

TEST(Schema, EnumAndConst) {
  EXPECT_EQ(from_text(R"({"enum":["1","2"]})", "1"), "\"1\"");
  EXPECT_EQ(from_text(R"({"enum":[1,2]})", "1"), "1");
  EXPECT_EQ(from_text(R"({"enum":["auto",1]})", "1"), "1");
  EXPECT_EQ(from_text(R"({"enum":["auto",1]})", "auto"), "\"auto\"");
  EXPECT_EQ(from_text(R"({"enum":["1",1,null]})", "1"), "\"1\"");
  EXPECT_EQ(from_text(R"({"enum":["none","null"]})", "none"), "\"none\"");
  EXPECT_EQ(from_text(R"({"enum":["none",null]})", "none"), "\"none\"");
  EXPECT_EQ(from_text(R"({"enum":["none",null]})", "null"), "null");
  EXPECT_EQ(from_text(R"({"enum":[true,false]})", "True"), "true");
  EXPECT_EQ(from_text(R"({"const":5})", "5"), "5");
  EXPECT_EQ(from_text(R"({"const":"5"})", "5"), "\"5\"");
  EXPECT_EQ(from_text(R"({"type":"string","enum":["1"]})", "1"), "\"1\"");
}

TEST(Schema, Nested) {
  const std::string schema = R"({"type":"object","properties":{
    "n":{"type":"integer"},"s":{"type":"string"},"b":{"type":"boolean"},"any":{},
    "list":{"type":"array","items":{"type":"object","properties":{"id":{"type":"string"}}}},
    "pair":{"type":"array","prefixItems":[{"type":"integer"},{"type":"string"}]}},
    "additionalProperties":{"type":"integer"}})";
  EXPECT_EQ(from_text(schema, R"({"n":"3","s":1.10,"b":"true","any":{"x":"1"},"other":"4"})"),
            R"({"n": 3, "s": "1.10", "b": true, "any": {"x": "1"}, "other": 4})");
  EXPECT_EQ(from_text(schema, R"({"list":[{"id":7},{"id":"8"}],"pair":["1",2]})"),
            R"({"list": [{"id": "7"}, {"id": "8"}], "pair": [1, "2"]})");
  // What does not fit stays.
  EXPECT_EQ(from_json(schema, R"({"n":"x","b":2,"list":{"id":1}})"),
            R"({"n": "x", "b": 2, "list": {"id": 1}})");
  // Text of an object, inside an object.
  EXPECT_EQ(from_json(R"({"properties":{"o":{"type":"object","properties":{"i":{"type":"integer"}}}}})",
                      R"({"o":"{\"i\": \"1\"}"})"),
            R"({"o": {"i": 1}})");
}

TEST(Schema, References) {
  const std::string schema = R"({"type":"object","$defs":{"Id":{"type":"string"},"a/b~":{"type":"integer"},
    "Node":{"type":"object","properties":{"id":{"$ref":"#/$defs/Id"},"next":{"anyOf":[{"$ref":"#/$defs/Node"},
    {"type":"null"}]}}}},"properties":{"id":{"$ref":"#/$defs/Id"},"n":{"$ref":"#/$defs/a~1b~0"},
    "node":{"$ref":"#/$defs/Node"},"loop":{"$ref":"#/properties/loop"},"gone":{"$ref":"#/none"}}})";
  const boost::json::value root = boost::json::parse(schema);
  const ParameterSchema view(&root, &root);
  EXPECT_EQ(view.member("id").coerce_text("12"), "\"12\"");
  EXPECT_EQ(view.member("id").text_form(), ParameterSchema::TextForm::kString);
  EXPECT_EQ(view.member("n").coerce_text("12"), "12");
  EXPECT_EQ(view.member("node").coerce_text(R"({"id":1,"next":{"id":2,"next":null}})"),
            R"({"id": "1", "next": {"id": "2", "next": null}})");
  EXPECT_EQ(view.member("loop").coerce_text("1"), "\"1\"");
  EXPECT_EQ(view.member("gone").coerce_text("1"), "\"1\"");
  EXPECT_EQ(view.member("undeclared").coerce_text("1"), "\"1\"");
}

TEST(Schema, AlternativesOfObjects) {
  const std::string schema = R"({"anyOf":[
    {"type":"object","properties":{"kind":{"const":"a"},"v":{"type":"integer"}},"required":["kind"]},
    {"type":"object","properties":{"kind":{"const":"b"},"v":{"type":"string"}},"required":["kind"]}]})";
  EXPECT_EQ(from_text(schema, R"({"kind":"a","v":"1"})"), R"({"kind": "a", "v": 1})");
  EXPECT_EQ(from_text(schema, R"({"kind":"b","v":1})"), R"({"kind": "b", "v": "1"})");
  EXPECT_EQ(from_text(schema, R"({"kind":"c","v":1})"), R"({"kind": "c", "v": 1})");
}

TEST(Schema, HostileSchemasCostLittle) {
  // Branches of branches, in circles; values nested as deep as they may be.
  const std::string circle =
      R"({"$defs":{"n":{"anyOf":[{"$ref":"#/$defs/m"},{"$ref":"#/$defs/n"},{"type":"array",
    "items":{"$ref":"#/$defs/n"}}]},"m":{"oneOf":[{"$ref":"#/$defs/n"},{"$ref":"#/$defs/m"}]}},"$ref":"#/$defs/n"})";
  std::string value = "\"x\"";
  for (int i = 0; i < 60; ++i) value = "[" + value + ",\"x\"]";
  from_text(circle, value);
  from_json(circle, value);
  std::string wide = "[";
  for (int i = 0; i < 20000; ++i) wide += "{\"a\":\"1\"},";
  EXPECT_EQ(from_json(circle, wide + "1]").size(), 20000u * 12 + 3);
}

TEST(ToolSet, BadToolsAreNamed) {
  const auto field = [](const std::string& json) { return field_of(ToolSet::parse(json).status()); };
  EXPECT_EQ(field("{"), "tools");
  EXPECT_EQ(field("{}"), "tools");
  EXPECT_EQ(field("[1]"), "tools[0]");
  EXPECT_EQ(field(R"([{"type":"function","function":{"name":"a"}},{"function":{}}])"),
            "tools[1].function.name");
  EXPECT_EQ(field(R"([{"type":"web_search"}])"), "tools[0].type");
  EXPECT_EQ(field(R"([{"name":""}])"), "tools[0].name");
  EXPECT_EQ(field(R"([{"name":"a","parameters":[]}])"), "tools[0].parameters");
  EXPECT_EQ(field(R"([{"name":"a"},{"name":"a"}])"), "tools[1].name");
  auto good =
      ToolSet::parse(R"([{"name":"ab"},{"type":"function","function":{"name":"b","parameters":null}}])");
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_TRUE((*good)->has("ab"));
  EXPECT_FALSE((*good)->has("a"));
  EXPECT_TRUE((*good)->has_prefix("a"));
  EXPECT_FALSE((*good)->has_prefix("c"));
}

TEST(JsonText, ReadsWhatJsonIs) {
  for (const char* good :
       {"0", "-1.5e+3", "\"\"", "\"a\\u00e9\\n\"", "[]", "[ ]", "{}", " {\"a\" : [ 1 , null ] } ", "true"}) {
    EXPECT_TRUE(read_json(good).has_value()) << good;
  }
  for (const char* bad :
       {"",      "01",         "1.",     "-",       ".5",  "+1",     "'a'",     "[1,]",        "{\"a\":}",
        "{a:1}", "{\"a\":1,}", "[1 2]",  "tru",     "nul", "\"\n\"", "\"\\x\"", "\"\\u12g4\"", "1 2",
        "\"",    "[",          "{\"a\"", "{\"a\":1"}) {
    EXPECT_FALSE(read_json(bad).has_value()) << bad;
  }
  EXPECT_TRUE(read_json(std::string(64, '[') + std::string(64, ']')).has_value());
  EXPECT_FALSE(read_json(std::string(65, '[') + std::string(65, ']')).has_value());
  EXPECT_FALSE(read_json(std::string(1000000, '[')).has_value());
  const auto members = json_members(
      *read_json("{\"a\\n\": 1.0, \"b\": [2, {\"c\": \"\\ud83d\\ude00\\ud800\"}], \"a\\n\": {}}"));
  ASSERT_EQ(members.size(), 3u);
  EXPECT_EQ(members[0].key, "a\n");
  EXPECT_EQ(members[0].value.text, "1.0");
  const auto elements = json_elements(members[1].value);
  ASSERT_EQ(elements.size(), 2u);
  EXPECT_EQ(json_string(json_members(elements[1])[0].value), "\xf0\x9f\x98\x80\xef\xbf\xbd");
  EXPECT_EQ(json_quoted("\"\\\b\f\n\r\t\x1f é"), "\"\\\"\\\\\\b\\f\\n\\r\\t\\u001f é\"");
}

}  // namespace
}  // namespace conclave::text
