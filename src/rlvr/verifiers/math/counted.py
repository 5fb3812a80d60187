"""Words that count: the common nouns behind a number, and the adjectives before them."""

from __future__ import annotations

_NOUNS = """
account acre adult airplane animal answer ant apartment apple arrangement article assignment athlete baby bag bagel
ball balloon banana band bar barrel basket bat bead bean bear bed bee beetle bead bicycle bike bill bird biscuit block
board boat book bookcase bottle bouquet bowl box boy bracelet branch bread brick bridge brother brownie bucket bug
building bulb bunny bus buses bush bushes business button cab cabin cake calf can candle candy car card carnation
carrot cart case cat cell cent chair chapter chicken child chip chocolate choice cinema circle class classroom client
clip clock cloud club coach coat code coin coloring colour color column combination committee computer cone
configuration congruence container cookie copy cord corner couch counter couple course cousin cow crate crayon cube
cubicle cup cupcake customer cycle cylinder daisy day degree desk device diagonal dice die difference digit dime dinner
direction dish divisor doctor dog doll donut door doughnut drawer dress drink driver drop duck edge egg element
elephant employee engine envelope equation error event exam exercise face factor family fan farm farmer fence field
figure file film finger fish fishes fishing flag flavor floor flower folder foot football form formula fox fraction
friend frog fruit function gallon game garden gate gift giraffe girl glass glove goal goat grade grain gram grandchild
grape graph grid group guest guitar gumball gun half-hour hamburger hammer hand handshake hat head heart hen hexagon
hole home horse hotdog hour house hundredth-place hut ice inch insect instrument integer intersection interval item jar
jewel job jug juice key kid kitten kiwi knife knives lamp lap lawn layer leaf leaves leg lemon lesson letter level
library light lily limit line lion list liter litre loaf loaves loop machine magazine mango map marble mark marker
match matrices matrix meal medal meeting member mermaid message meter metre mile minute mistake mole monkey month mouse
movie muffin mug multiple muffin necklace neighbor newspaper nickel night node note notebook number nurse nut object
octagon office operation option orange orchid order outcome outfit owl page pail painting pair pan pancake panel paper
parallelogram parameter parent park parrot part partition party passenger path patient pattern pea peach pear pebble
pen pencil penguin penny pentagon permutation person pet phone photo piano picture pie piece pig pill pillow pineapple
pizza place plane planet plant plate player plum point pole polygon polynomial pond pool position possibility post pot
potato pound present presentation prime prism prize problem product program project puppy puzzle pyramid quadrilateral
question rabbit race ray rectangle region relation ribbon ring road robot rock roll room root rope rose round route row
ruler runner salad sandwich scarf school scoop score seat section seed segment selection sentence sequence set shape
share sheep shell shelf shelves ship shirt shoe shop shot side sign sister site skirt slice slot snack snake sock soda
soldier solution song spider spoon sport spot square squirrel staff stair stamp star state station stem step stick
sticker stone stop store story straw strawberry street string student subject subset subscriber suitcase sum sunflower
sweater symbol table tablet tail task team teacher teammate teaspoon teeth tent term test text ticket tie tile toe
token tomato tooth tour towel tower town toy track train trapezoid tray tree triangle trip triple trophy truck tulip
turkey turn turtle tuple uncle unit value van vase vector vegetable vehicle vertex vertices video village visit visitor
volunteer vote voter wall water watermelon way week weekend wheel window winner wire wolf wolves word work worker year
yard zebra zero ways people men women """
NOUNS = frozenset(_NOUNS.split())
"""Singular, as `units.singular` makes it, and plurals that it does not know."""
ADJECTIVES = frozenset(
    """
    additional any big black blue brown chocolate complete complex cubic different distinct equal even extra full
    golden gray green grey identical integer integral irrational large little long negative new nonnegative odd orange
    ordered per pink positive possible prime purple rational real red regular remaining short small some square tall
    total unique unordered valid white whole wide yellow young """.split()  # noqa: SIM905 - a list of words
)
"""Words that may stand between a number and what it counts, never alone behind it (`5 negative`)."""
