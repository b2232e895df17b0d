"""Varied strings for comparing tokenizers: made up here from a seed, no outside text."""

import random

SCRIPTS = {
    "latin": "café naïve Zürich señor smørrebrød œuvre Łódź ŒUVRE İstanbul straße ﬁne ǅungla ŉ".split(),
    "greek": "καλημέρα κόσμε Ἀρχιμήδης ΟΔΥΣΣΕΥΣ ὦ".split(),
    "cyrillic": "Привет мир Ёлка йод ДОМ ѣ ҂".split(),
    "arabic": "مرحبا بالعالم ٣٤٥٦ لَا كِتَابٌ".split(),
    "hebrew": "שָׁלוֹם עולם אבג".split(),
    "indic": "नमस्ते दुनिया १२३४ தமிழ் বাংলা ಕನ್ನಡ".split(),
    "thai": "สวัสดีชาวโลก ๑๒๓ ภาษาไทย".split(),
    "hangul": "안녕하세요 세계 한글".split(),
    "cjk": "你好世界 机器学习 東京 カタカナ ひらがな が ㍿ 〇 々".split(),
    "symbols": "∑∏√ ½ Ⅷ ② ① ² µ Ω Å ™ € £ ¥ ← ⇒ ■ ♥ ﷺ ﬃ".split(),
    "emoji": ["🎉", "👨‍👩‍👧", "👍🏽", "🇨🇭", "❤️", "🏴\U000e0067\U000e0062\U000e007f", "🫠", "1️⃣"],
}
WORDS = (
    "the of and to in is that it was for on are as with they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know server "
    "expert shard token batch scheduler worker cluster attention router stream request HTTPServer camelCase XMLParser "
    "snake_case iPhone McDonald NASA don't I'll you've WE'RE they'd it's I'M DON'T O'Brien ’tis 'twas rock'n'roll"
).split()
CODE = [
    "def f(x):\n    return x * 2  # twice\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n\t}\r\n",
    'std::vector<std::string> v{"a", "b"};\n',
    "if x==1:\r\n    return\r\n\r\n",
    '{"key": [1, 2.5e-3, null, true], "nested": {"a": "\\u00e9"}}',
    "SELECT * FROM t WHERE id >= 10 AND name LIKE '%x%';",
    "https://example.org/path/to/file.py?q=1&r=%20#frag",
    "#include <stdio.h>\n\nint main(void) { return 0; }\n",
    "<div class=\"a b\">\n  <p>text</p>\n</div>",
    "$ make -j2 && ./run --flag=1 || exit 1\n",
    "a->b::c(d)[e]{f} // !@#$%^&*()_+-=[]{}|;':\",./<>?`~\\",
    "x^2 + y^2 = z^2\n\n\n\\frac{1}{2}",
]
SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680\u180e\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
MARKS = "\u0300\u0301\u0303\u0308\u030a\u0323\u0327\u0328\u0338\u0344\u0345\u05b0\u05b8\u064e\u0651\u093c\u0f71\u0f72\u0f74\u3099\u309a\u0897\u08d3\u1dfa\U0001e8d0\U00011f41\u0c3c\u09fe"
BASES = "aAeEoOuUcCiİsſΑαωЕеИиक़ড়かはウ한ㄱ가\u1100\u1161\u11a8\u2126\u212a\u212b\uf900\ufb1d\u0958"
RECENT = "\u1c89\u1c8a\ua7cb\ua7da\U000105c0\U00010d4a\U00010d50\U00010d70\U00011f04\U00011f50\U0001611e\U00016d40\U0001ccf0\U0001e4d0\U0001e030\U0001fae8\U000323af\U0002ebf0\u31ef\U00011bf0"
CONTRACTIONS = ["'s", "'S", "'T", "'Re", "'LL", "'ſ", "'d", "'M", "’s", "''s", "'x"]


class Samples:
    def __init__(self, seed, added=()):
        self.r = random.Random(seed)
        self.added = list(added)

    def word(self):
        r = self.r
        if r.random() < 0.6:
            return r.choice(WORDS)
        return r.choice(SCRIPTS[r.choice(sorted(SCRIPTS))])

    def prose(self):
        r = self.r
        out = []
        for _ in range(r.randint(1, 14)):
            w = self.word()
            p = r.random()
            if p < 0.1:
                w = w.upper()
            elif p < 0.2:
                w = w.capitalize()
            if r.random() < 0.1:
                w += r.choice(CONTRACTIONS)
            out.append(w)
        text = r.choice([" ", " ", " ", "  ", "\n", "", "\t"]).join(out)
        return text + r.choice(["", ".", "!", "?!", "...", " ", "\n", "\n\n"])

    def code(self):
        return "".join(self.r.choice(CODE) for _ in range(self.r.randint(1, 2)))

    def numbers(self):
        r = self.r
        out = []
        for _ in range(r.randint(1, 6)):
            n = str(r.randrange(10 ** r.randint(1, 14)))
            out.append(r.choice([n, "-" + n, "$" + n + ".99", n + "%", "0x" + n, n + "e-7", n + r.choice("٣१๑²Ⅷ½")]))
        return r.choice([" ", ",", "", "/", ":"]).join(out)

    def spaces(self):
        r = self.r
        out = []
        for _ in range(r.randint(1, 5)):
            out.append(r.choice(SPACES) * r.randint(1, 6) if r.random() < 0.5 else
                       "".join(r.choice(SPACES) for _ in range(r.randint(1, 6))))
            if r.random() < 0.7:
                out.append(r.choice(["a", "word", "9", "!", "/", "你"]))
        return "".join(out)

    def marks(self):
        r = self.r
        return "".join(r.choice(BASES) + "".join(r.choice(MARKS) for _ in range(r.randint(0, 4)))
                       for _ in range(r.randint(1, 6)))

    def code_points(self):
        r = self.r
        out = []
        for _ in range(r.randint(1, 16)):
            top = r.choice([0x80, 0x250, 0x3000, 0xd800, 0x20000, 0x110000])
            c = r.randrange(top)
            out.append(chr(c) if not 0xd800 <= c < 0xe000 else "\ud7ff")
        return "".join(out)

    def recent(self):
        r = self.r
        return "".join(r.choice([r.choice(RECENT), r.choice(RECENT).upper(), "a", "B", " ", "1", "!", "\n", "é"])
                       for _ in range(r.randint(2, 12)))

    def runs(self):
        r = self.r
        return "".join(r.choice(["a", "A", " ", "\n", "=", "-", "ab", "0", "é", "你", "\r\n", "!?"]) * r.randint(1, 60)
                       for _ in range(r.randint(1, 3)))

    def random_bytes(self):
        r = self.r
        raw = bytes(r.randrange(256) for _ in range(r.randint(1, 24)))
        return raw.decode("utf-8", "replace")

    def with_added(self):
        r = self.r
        out = []
        for _ in range(r.randint(1, 5)):
            token = r.choice(self.added)
            p = r.random()
            if p < 0.15:
                token = token[: r.randrange(len(token))]
            elif p < 0.2:
                token = token.upper()
            out.append(r.choice(["", " ", "x", "\n", self.word(), " é", self.spaces(), "e\u0301"]))
            out.append(token)
        return "".join(out) + r.choice(["", " ", "y", "\u0301", "\n"])

    def sample(self):
        kinds = [self.prose, self.prose, self.prose, self.code, self.numbers, self.spaces, self.marks,
                 self.code_points, self.recent, self.runs, self.random_bytes]
        if self.added:
            kinds += [self.with_added, self.with_added]
        text = self.r.choice(kinds)()
        if self.r.random() < 0.15:
            text += self.r.choice(kinds)()
        return text

    def raw(self):
        """Bytes that are mostly not UTF-8, near-misses included."""
        r = self.r
        pieces = [b"\xe2\x82", b"\xf0\x9f\x98", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x80",
                  "é".encode(), "你".encode(), "🎉".encode(), b"abc ", b"\xe0\x80", b"\xf0\x80\x80", b"\n"]
        return b"".join(r.choice(pieces) for _ in range(r.randint(1, 8)))
