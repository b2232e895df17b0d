"""Words, names and values that the generator draws from, and the rule that splits them into train and held-out.

An item belongs to the held-out split by its own hash, so the two splits share none whatever is drawn and in which order.
"""

import zlib

HELD_OUT_ONE_IN = 12

COLOURS = "red blue green yellow black white brown grey pink purple orange silver".split()
ROOMS = "attic cellar kitchen garden garage office library studio hall tower stable shed".split()
SKIES = "sun rain snow fog wind hail storm clouds".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SOURCES = "news books maps papers forums videos".split()
CITIES = """Lisbon Oslo Paris Berlin Madrid Rome Vienna Prague Dublin Athens Cairo Tokyo Osaka Seoul Delhi Mumbai Lima Quito
Bogota Havana Boston Denver Austin Dallas Chicago Toronto Ottawa Sydney Perth Bergen Turin Milan Naples Porto Seville
Lyon Nantes Geneva Zurich Basel Munich Hamburg Bremen Krakow Warsaw Riga Tallinn Helsinki Malmo Odense Utrecht Ghent""".split()
WORDS = """lantern garden window pencil river mountain basket candle bridge forest market silver winter summer island
harbour planet rocket camera guitar violin orange lemon carrot pepper butter cheese bottle pillow blanket mirror carpet
ladder hammer shovel bucket needle thread button pocket jacket helmet sandal turtle rabbit monkey dolphin falcon spider
beetle parrot donkey salmon walnut cherry banana tomato potato onion garlic ginger copper marble granite velvet cotton
engine wheel saddle anchor compass rudder canoe ferry tunnel castle temple palace cottage chapel museum theatre school
teacher doctor farmer baker tailor sailor pilot singer dancer writer painter doubt glory honest humble gentle clever
silent brave narrow hollow simple ancient modern frozen golden wooden bronze paper metal cloud storm thunder
breeze desert valley canyon meadow prairie glacier volcano comet meteor galaxy signal beacon lamp flame spark ember
ocean coral pearl shell coast reef delta stream brook pond lake swamp moss fern ivy oak maple birch cedar willow poppy
tulip daisy clover violet jasmine lily rose thorn branch blossom acorn honey sugar salt flour bread cake soup stew
cup plate fork spoon knife kettle oven stove chair shelf drawer closet door floor wall roof brick stone tile
train plane truck wagon sled kite drum flute horn bell clock watch ring crown sword shield arrow bow rope chain hook
net trap cage nest hive den cave mine well dam mill barn fence gate path road trail map atlas letter stamp parcel""".split()
WORDS = [w for w in WORDS if w not in COLOURS + ROOMS + SKIES + SOURCES]
LABELS = "tea gym work lunch dinner train bus nap yoga run walk meeting class medicine plants oven laundry".split()

ONSETS = "b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pl st tr".split()
VOWELS = "a e i o u".split()
CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "k"]


def held_out(kind, item):
    return zlib.crc32(f"{kind}:{item}".encode()) % HELD_OUT_ONE_IN == 0


def made_up(rng, syllables):
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables))


def drawn(draw, kind, split):
    """The first of draw()'s items that belongs to the split ("train" or "held")."""
    while True:
        item = draw()
        if held_out(kind, item) == (split == "held"):
            return item


def word(rng, split, longest=9, common=0.35):
    def draw():
        if rng.random() < common:
            w = rng.choice(WORDS)
        else:
            w = made_up(rng, rng.choice((1, 2, 2, 3)))
        return w if 3 <= len(w) <= longest else "lamp"
    return drawn(draw, "word", split)


def name(rng, split):
    """A capitalized name: of a city, of a thing."""
    return drawn(lambda: rng.choice(CITIES) if rng.random() < 0.2 else made_up(rng, rng.choice((2, 2, 3))).capitalize(), "name", split)


def phrase(rng, split, longest=3):
    """One to three words; the split goes by the whole of it."""
    def one():
        return rng.choice(WORDS) if rng.random() < 0.5 else made_up(rng, 2)
    return drawn(lambda: " ".join(one() for _ in range(rng.randint(1, longest))), "phrase", split)
