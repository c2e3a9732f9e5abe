// safe_regex.cc: SafeRegex: a pattern becomes a small program whose states run side by side.
#include <bitset>
#include <cctype>
#include <cstdint>
#include <utility>

#include "checkpoint/name_patterns.h"

namespace megamoe {
namespace {

using CharSet = std::bitset<256>;

constexpr std::size_t kMaxPattern = 2000;
constexpr std::size_t kMaxProgram = 4000;
constexpr int kMaxDepth = 32;
constexpr int kMaxRepeat = 100;

struct Node {
  enum Kind { kEmpty, kSet, kBegin, kEnd, kConcat, kAlternate, kRepeat } kind = kEmpty;
  CharSet set;
  std::vector<Node> children;
  int min = 0;
  int max = -1;  // -1: no end
};

struct Refused {};  // leaves the compiler for any reason; never leaves this file

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Node parse() {
    Node node = alternatives(0);
    if (at_ != text_.size()) throw Refused{};
    return node;
  }

 private:
  bool more() const { return at_ < text_.size(); }
  char peek() const { return more() ? text_[at_] : '\0'; }
  char take() {
    if (!more()) throw Refused{};
    return text_[at_++];
  }
  bool accept(char c) {
    if (!more() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  Node alternatives(int depth) {
    if (depth > kMaxDepth) throw Refused{};
    Node node{Node::kAlternate, {}, {}, 0, -1};
    do {
      Node branch{Node::kConcat, {}, {}, 0, -1};
      while (more() && peek() != '|' && peek() != ')') branch.children.push_back(repeated(depth));
      node.children.push_back(std::move(branch));
    } while (accept('|'));
    return node;
  }

  Node repeated(int depth) {
    Node node = atom(depth);
    for (int levels = 0; more(); ++levels) {
      int min = 0, max = -1;
      if (accept('*')) {
      } else if (accept('+')) {
        min = 1;
      } else if (accept('?')) {
        max = 1;
      } else if (accept('{')) {
        min = number();
        max = accept(',') ? (peek() == '}' ? -1 : number()) : min;
        if (!accept('}') || (max >= 0 && max < min)) throw Refused{};
      } else {
        break;
      }
      accept('?');  // lazy repetition: the same language
      if (levels >= 2) throw Refused{};
      Node outer{Node::kRepeat, {}, {}, min, max};
      outer.children.push_back(std::move(node));
      node = std::move(outer);
    }
    return node;
  }

  int number() {
    int value = 0;
    if (!std::isdigit(static_cast<unsigned char>(peek()))) throw Refused{};
    while (std::isdigit(static_cast<unsigned char>(peek()))) {
      value = value * 10 + (take() - '0');
      if (value > kMaxRepeat) throw Refused{};
    }
    return value;
  }

  static CharSet one(char c) { return CharSet().set(static_cast<unsigned char>(c)); }
  static CharSet where(int (*predicate)(int)) {
    CharSet set;
    for (int c = 0; c < 128; ++c) set[static_cast<std::size_t>(c)] = predicate(c) != 0;
    return set;
  }

  CharSet escape() {
    const char c = take();
    const CharSet word = where(std::isalnum) | one('_');
    switch (c) {
      case 'd': return where(std::isdigit);
      case 'D': return ~where(std::isdigit);
      case 'w': return word;
      case 'W': return ~word;
      case 's': return where(std::isspace);
      case 'S': return ~where(std::isspace);
      default:
        if (std::isalnum(static_cast<unsigned char>(c))) throw Refused{};
        return one(c);
    }
  }

  CharSet char_class() {
    const bool negated = accept('^');
    CharSet set;
    for (bool first = true; first || peek() != ']'; first = false) {
      const char c = take();
      if (c == '\\') {
        set |= escape();
        continue;
      }
      char last = c;
      if (peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        last = take();
        if (last == '\\' || static_cast<unsigned char>(last) < static_cast<unsigned char>(c)) throw Refused{};
      }
      for (int v = static_cast<unsigned char>(c); v <= static_cast<unsigned char>(last); ++v) {
        set.set(static_cast<std::size_t>(v));
      }
    }
    ++at_;  // ]
    return negated ? ~set : set;
  }

  Node atom(int depth) {
    const char c = take();
    Node node{Node::kSet, {}, {}, 0, -1};
    switch (c) {
      case '(':
        if (accept('?') && !accept(':')) throw Refused{};
        node = alternatives(depth + 1);
        if (!accept(')')) throw Refused{};
        return node;
      case '.': node.set = ~one('\n'); return node;
      case '[': node.set = char_class(); return node;
      case '\\': node.set = escape(); return node;
      case '^': node.kind = Node::kBegin; return node;
      case '$': node.kind = Node::kEnd; return node;
      case '*':
      case '+':
      case '?':
      case '{': throw Refused{};
      default: node.set = one(c); return node;
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

struct SafeRegex::Program {
  struct Instruction {
    enum Op { kSet, kSplit, kJump, kBegin, kEnd, kMatch } op;
    CharSet set;  // kSet
    int x = 0;    // kSplit, kJump
    int y = 0;    // kSplit
  };
  std::vector<Instruction> code;

  int next() const { return static_cast<int>(code.size()); }
  int emit(Instruction::Op op, const CharSet& set = {}, int x = 0, int y = 0) {
    if (code.size() >= kMaxProgram) throw Refused{};
    code.push_back({op, set, x, y});
    return next() - 1;
  }

  void emit(const Node& node) {
    switch (node.kind) {
      case Node::kEmpty: break;
      case Node::kSet: emit(Instruction::kSet, node.set); break;
      case Node::kBegin: emit(Instruction::kBegin); break;
      case Node::kEnd: emit(Instruction::kEnd); break;
      case Node::kConcat:
        for (const Node& child : node.children) emit(child);
        break;
      case Node::kAlternate: {
        std::vector<int> jumps;
        for (std::size_t i = 0; i + 1 < node.children.size(); ++i) {
          const int split = emit(Instruction::kSplit, {}, next() + 1);
          emit(node.children[i]);
          jumps.push_back(emit(Instruction::kJump));
          code[static_cast<std::size_t>(split)].y = next();
        }
        emit(node.children.back());
        for (int jump : jumps) code[static_cast<std::size_t>(jump)].x = next();
        break;
      }
      case Node::kRepeat: {
        const Node& body = node.children.front();
        for (int i = 0; i < node.min; ++i) {
          const int before = next();
          emit(body);
          if (next() == before) break;  // an empty body is the same once or a hundred times
        }
        if (node.max < 0) {
          const int split = emit(Instruction::kSplit, {}, next() + 1);
          emit(body);
          emit(Instruction::kJump, {}, split);
          code[static_cast<std::size_t>(split)].y = next();
        }
        std::vector<int> splits;
        for (int i = node.min; i < node.max; ++i) {
          splits.push_back(emit(Instruction::kSplit, {}, next() + 1));
          emit(body);
        }
        for (int split : splits) code[static_cast<std::size_t>(split)].y = next();
        break;
      }
    }
  }
};

SafeRegex::~SafeRegex() = default;

std::shared_ptr<const SafeRegex> SafeRegex::compile(std::string_view pattern) {
  if (pattern.size() > kMaxPattern) return nullptr;
  try {
    const std::shared_ptr<SafeRegex> regex(new SafeRegex);
    regex->program_ = std::make_unique<Program>();
    regex->program_->emit(Parser(pattern).parse());
    regex->program_->emit(Program::Instruction::kMatch);
    return regex;
  } catch (const Refused&) {
    return nullptr;
  }
}

bool SafeRegex::matches(std::string_view text) const {
  using Instruction = Program::Instruction;
  const std::vector<Instruction>& code = program_->code;
  std::vector<int> now, then, stack;
  std::vector<std::size_t> seen(code.size(), text.size() + 1);  // the last position a state was entered at
  // Enters a state and all that follow it without reading; true if the pattern has matched.
  const auto enter = [&](int start, std::size_t at, std::vector<int>& states) {
    stack.assign(1, start);
    while (!stack.empty()) {
      const int pc = stack.back();
      stack.pop_back();
      const auto i = static_cast<std::size_t>(pc);
      if (seen[i] == at) continue;
      seen[i] = at;
      switch (code[i].op) {
        case Instruction::kMatch: return true;
        case Instruction::kJump: stack.push_back(code[i].x); break;
        case Instruction::kSplit:
          stack.push_back(code[i].y);
          stack.push_back(code[i].x);
          break;
        case Instruction::kBegin:
          if (at == 0) stack.push_back(pc + 1);
          break;
        case Instruction::kEnd:
          if (at == text.size()) stack.push_back(pc + 1);
          break;
        case Instruction::kSet: states.push_back(pc); break;
      }
    }
    return false;
  };
  if (enter(0, 0, now)) return true;
  for (std::size_t at = 0; at < text.size() && !now.empty(); ++at) {
    then.clear();
    for (int pc : now) {
      if (code[static_cast<std::size_t>(pc)].set[static_cast<unsigned char>(text[at])] &&
          enter(pc + 1, at + 1, then)) {
        return true;
      }
    }
    now.swap(then);
  }
  return false;
}

}  // namespace megamoe
