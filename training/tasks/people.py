"""Names and closed sets of answers for questions about documents."""

NAMES = """Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nora Oscar Paul Rosa Sam Tina Victor Alice
Bruno Carl Diana Erik Fiona George Helen Ivan Julia Karl Laura Martin Nina Otto Peter Ruth Simon Tom Vera""".split()
CITIES = """Paris London Rome Berlin Madrid Vienna Oslo Athens Dublin Prague Lisbon Warsaw Cairo Delhi Tokyo Boston Lima
Geneva Milan Venice""".split()
COLOURS = "red blue green black white yellow orange purple brown pink grey silver".split()
JOBS = (
    "doctor baker teacher farmer sailor painter writer driver lawyer nurse singer cook builder tailor gardener".split()
)
ANIMALS = "dog cat horse rabbit parrot goat sheep duck turtle mouse fox bear".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
CLOSED = (*NAMES, *CITIES, *COLOURS, *JOBS, *ANIMALS, *DAYS)
