"""The sentences that ``kitchen demo`` embeds: written for it, from two words to several hundred."""

SENTENCES = (
    "Good morning.",
    "Fresh bread",
    "Who ate the last pear?",
    "The kettle is on.",
    "Rain again, all week.",
    "Please close the oven door.",
    "My sister plays the cello.",
    "Seven ships left the harbour at dawn.",
    "A red fox crossed the frozen field.",
    "Invoice 4471 was paid twice by mistake.",
    "He whispered the password and the gate swung open.",
    "How long should lentils soak before they are cooked?",
    "The printer on the third floor is out of paper again.",
    "Our train was late, so we missed the ferry to the island.",
    "Python lists grow by a factor, not by a fixed amount.",
    "The committee postponed its decision until the spring meeting.",
    "She sharpened the knife on a wet stone before slicing the onions.",
    "Interest rates rose for the third time since last autumn.",
    "The cat sleeps on the warm router and blocks the signal.",
    "Volcanic soil makes the slopes good for growing grapes and tomatoes.",
    "Turn left at the old mill and follow the river for two miles.",
    "A mutex that is never released is a very quiet kind of bug.",
    "The doctor asked whether the pain was worse in the evening.",
    "Nobody in the village remembered when the clock had stopped.",
    "We need eleven chairs, two tables and somebody who can carry them.",
    "The goalkeeper dived the wrong way and still touched the ball.",
    "Salt lowers the freezing point of water, which is why roads are gritted.",
    "Ma grand-mère préparait une soupe à l'oignon chaque dimanche.",
    "Die Brücke wird im Herbst wegen Bauarbeiten gesperrt.",
    "E = mc^2; x <- x - lr * grad; SELECT name FROM cooks WHERE hat = 'tall';",
    "The museum lends its drawings only to places that can keep the light dim and the air dry.",
    "After the storm the children collected driftwood and built a small, crooked hut on the beach.",
    "The court found that the contract had been signed under pressure and therefore was not binding.",
    "If the dough sticks to your hands, add a little flour; if it cracks, add a little water and wait.",
    "Migrating geese take turns at the front, because the bird behind another one needs less strength.",
    "The new battery lasts nine hours in the laboratory and, as every owner will tell you, six in a coat pocket.",
    "Her first novel was refused by fourteen publishers, and the fifteenth asked only that she change the title.",
    "Between the two wars the factory made bicycles, then radios, and finally nothing at all for almost twenty years.",
    "Light that left this galaxy when fish first crawled ashore has just now reached a mirror on top of a mountain.",
    "To reset the thermostat hold both buttons until the display flashes, let go, and set the time within ten seconds.",
    "The orchestra tuned to the oboe, the lights went down, and somewhere in the second row a telephone began to ring.",
    "Customers who bought the blue tent also bought a lantern, a folding stool and, surprisingly often, a second blue tent.",
    "The shepherd counted his flock by scratching marks on a stick, one for each animal, and cut a notch across at every "
    "twentieth, so that in the evening a glance told him whether one of them was still on the hill.",
    "When a matrix has only a few large singular values, a product of two thin matrices can stand in for it, and the rest, "
    "which is small and without pattern, may be rounded coarsely without anybody noticing the loss.",
    "The old baker never wrote his recipes down. He said that flour was different every week, that the weather sat at the "
    "table with him, and that a number on paper would only make his apprentices stop looking at the dough.",
    "Clinics in the valley report fewer cases of asthma since the brickworks moved, but the doctors warn that three quiet "
    "years are a short time, that the winters were mild, and that many families left the valley with the works.",
    "Dear neighbours, on Saturday we will move our piano out through the front window with the help of a crane. The street "
    "will be closed from nine until about noon. There will be coffee for everybody who would like to watch, and cake for "
    "those who are willing to hold a rope.",
    "The river had been straightened a century ago to drain the meadows, and it took the engineers only two summers to give "
    "it back its bends. The kingfishers returned in the first spring, the farmers' complaints in the second; by the fifth, "
    "after a flood that passed harmlessly over the meadows while the next town downstream stacked sandbags, nobody could be "
    "found who had been against it. The engineers keep the letters in a folder, and show them to visitors.",
    "A compiler reads a program as a strict teacher reads an essay: it underlines everything that breaks a rule, says "
    "nothing about whether the idea is any good, and hands the work back with a remark that makes sense only to those who "
    "already know what they did wrong. A good compiler goes further. It says which rule was broken, where, what it expected "
    "to find in that place, and what the writer could do about it; it does not stop at the first mistake, and it does not "
    "repeat the same complaint forty times. Few of us read such messages to the end, but those of us who do learn the "
    "language from them.",
    "The expedition left the last village with twelve mules, four guides and provisions for ninety days. By the end of the "
    "second week three of the mules had gone lame, and the leader, against the advice of his guides, divided the loads among "
    "the others instead of leaving the heavy instruments behind. On the pass they met snow. They spent six nights under a "
    "rock, burned the crates of the instruments to melt water, and came down on the other side with frostbitten hands and "
    "without a single measurement. In his report the leader praised the courage of his men and blamed the maps. The guides, "
    "who could not read it, told another story in the village: that the mountain had been patient with them, that it had "
    "given three warnings, one for each mule, and that a man who counts his instruments before he counts his animals should "
    "stay in the plain.",
    "Preheat the oven to two hundred degrees. Cut the pumpkin in half, scrape out the seeds, and rub the inside with oil, "
    "salt and a little crushed coriander. Roast it for fifty minutes, until a knife goes in without effort. Meanwhile soften "
    "two onions in butter, add a spoonful of ground cumin and a chopped chilli, and let them cook slowly; they should turn "
    "golden, never brown. Spoon the flesh out of its skin, add it to the onions, and cover everything with a litre of stock. "
    "Simmer for a quarter of an hour, then blend it until it is smooth. If it is too thick, add stock; if it is too thin, "
    "let it simmer a little longer with the lid off. Taste it now, and not before: pumpkins differ, and only at the end can "
    "you tell whether the soup wants lemon, sugar or more salt. Serve with toasted seeds and a spoonful of yoghurt.",
    "Minutes of the annual meeting of the allotment society. Present were thirty-one members and one dog. The treasurer "
    "reported that the balance had grown by four per cent, chiefly because the pump had not broken down. A motion to replace "
    "the pump while it still works was discussed at length and adjourned to next year, as in every year since the pump was "
    "bought. The member of plot nineteen complained about the bindweed of plot twenty; the member of plot twenty replied that "
    "bindweed knows no borders. It was agreed that both would dig on the same Sunday. The prize for the heaviest marrow went "
    "to plot seven for the third time, and the prize for the best scarecrow to the children of plot twelve, whose figure was "
    "said to look a good deal like the treasurer. The treasurer congratulated them. The dog was thanked for its patience, and "
    "the meeting closed at ten minutes past nine with tea, plum cake, and an exchange of seeds, labelled and unlabelled.",
    "What is the capital of Australia?",
    "cheap flights to Lisbon in May",
    "error: undefined reference to 'main'",
    "The soup needs salt.",
)

# What the formats are calibrated on. None of these is among those that are judged.
CALIBRATION_SENTENCES = (
    "Thank you.",
    "No entry",
    "Where is my umbrella?",
    "It snowed in April.",
    "second-hand bicycles near me",
    "Open the window, please.",
    "She never answers letters.",
    "TypeError: 'NoneType' object is not iterable",
    "how to remove red wine from a carpet",
    "The bridge was painted green.",
    "What year did the first railway open?",
    "Der Zug hat heute vierzig Minuten Verspätung.",
    "Les enfants jouent dans la cour de l'école.",
    "El mercado abre a las siete de la mañana.",
    "best hiking boots for wide feet",
    "for i in range(10): print(i ** 2)",
    "The lighthouse keeper retired last summer.",
    "Prices include tax but not delivery.",
    "Two of the three witnesses had been asleep.",
    "He plays chess by post with a man in Iceland.",
    "Warning: the floor is slippery when it is wet.",
    "Which vitamins are found in carrots and spinach?",
    "The moon was so bright that we could read outside.",
    "Her violin is older than the house she keeps it in.",
    "Our neighbour's rooster has no respect for Sundays.",
    "A glacier moves a little faster in the afternoon.",
    "The password must have twelve letters and a digit.",
    "Nurses work three night shifts and then rest for four days.",
    "Please find attached the minutes of Tuesday's meeting.",
    "The striker was injured in the final minute of the match.",
    "Copper turns green because it reacts with air and rain.",
    "My grandfather could whistle two notes at the same time.",
    "The election result was announced shortly before midnight.",
    "git commit -m 'fix off-by-one in the parser'; git push origin main",
    "Bees tell each other by a dance where the flowers are.",
    "The tenant shall give notice in writing three months ahead.",
    "If x is even then x squared is even; the converse holds as well.",
    "We lost the signal somewhere behind the second range of hills.",
    "The recipe calls for saffron, but nobody will notice turmeric.",
    "She defended her thesis on a Friday and was at sea by Monday.",
    "A virus cannot multiply without the machinery of a living cell.",
    "The stock fell nine percent after the chief executive resigned.",
    "Could you tell me whether this bus stops at the central hospital?",
    "They bought the farm for its view and sold it because of the wind.",
    "The painter ground his own colours and mixed them with walnut oil.",
    "Most of the passengers had not noticed that the ship was turning.",
    "Wolves returned to the forest forty years after the last was shot.",
    "HTTP 404 means that the server was reached and the page was not there.",
    "The old cinema is now a climbing hall with a very good coffee machine.",
    "Every spring the carpenter planes the door, and every autumn it sticks.",
    "In chess a pawn that reaches the last rank may become any other piece.",
    "The satellite photographs the same strip of desert every sixteen days.",
    "To tie the knot, pass the long end twice around the post and under itself.",
    "The jury could not agree, so a second trial was set for the first of June.",
    "Tea came to the coast by ship and to the inland towns on the backs of camels.",
    "A good editor removes the sentence of which the author is most proud.",
    "The patient complained of dizziness and was told to drink more and stand up slowly.",
    "When the dam was finished, the church tower still showed above the water in dry summers.",
    "Vaccines train the immune system with a harmless part of what might attack it later.",
    "The company promised to refund every ticket, and then stopped answering the telephone.",
    "Please water the ferns twice a week, the cactus once a month, and the plastic palm never.",
    "A hash table answers in constant time as long as its keys are spread evenly over the buckets.",
    "The two brothers spoke different dialects because each had been sent to a different aunt.",
    "Although the road was shorter, the guide preferred the path, since the path had never been robbed.",
    "The choir rehearses on Wednesdays in the gymnasium, which smells of rubber and has a perfect echo.",
    "Earthquakes cannot be predicted to the day, but the places where they will happen are well known.",
    "I would like to cancel my subscription, and I have now written this sentence to you four times.",
    "The gallery bought the drawing for eleven pounds in 1912 and insured it for eleven million last year.",
    "Farmers in the delta plant rice in the wet months and, on the same fields, lentils in the dry ones.",
    "The referee stopped the game for a hedgehog, which took its time and was applauded off the pitch.",
    "An honest scale weighs the same in the morning as in the evening; an honest merchant checks it twice.",
    "Because the cable had been cut, the island was without telephone, television and arguments for a week.",
    "The professor began each lecture with a mistake, and gave a chocolate to the first student who found it.",
    "Sharks have lived in the sea for longer than trees have stood on land, and have changed much less since.",
    "The locksmith opened the safe in four minutes, charged for an hour, and explained that the rest was practice.",
    "Insulin was first given to a human being in January 1922, and within a year it was being made in quantity.",
    "The spacecraft will pass the planet at a distance of nine thousand kilometres and use its pull to change course.",
    "At the border they looked into the trunk, counted the cheeses, shook their heads, and let the family drive on.",
    "Add one to the counter, compare it with the limit, and, if it is not yet reached, jump back to the first line.",
    "A sonnet has fourteen lines, a limerick five, and a telegram, which was paid by the word, as few as could be borne.",
    "The museum of failed inventions is open on weekdays, except when its automatic doors have locked the staff out again.",
    "Inflation is easiest to see at the baker's: the loaf costs the same as it did last year, and it has become smaller.",
    "The archive holds nine kilometres of shelves, and the one box that the historian needed had been labelled as curtains.",
    "After the second rehearsal the conductor asked the trumpets to play as if they were standing in the next valley, and "
    "the flutes as if they had just woken up; the percussion, he said, should imagine a very small kitchen.",
    "The plumber traced the leak from the ceiling to a pipe, from the pipe to a valve, and from the valve to a previous "
    "plumber, whose sticker with a telephone number was still attached to the boiler.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. At night the plant burns part of the sugar "
    "again, as animals do, and what is left over becomes leaves, wood, fruit and, much later, coal.",
    "Your order has been shipped and should arrive within three working days. If you are not at home, the parcel is left "
    "with a neighbour or taken to the post office, where it waits for a week. Returns are free until the end of the month.",
    "Machine learning models are trained by showing them examples and correcting their answers a little each time. What "
    "they learn is not written down anywhere as a rule: it is spread over millions of numbers, and reading it out of them "
    "again is a science of its own.",
    "The tenants on the second floor hear the lift, those on the third hear the tenants on the fourth, and those on the "
    "fourth hear nothing at all, because they have put carpets on the floor, carpets on the walls, and, since the twins "
    "were born, wax in their ears.",
    "In the spring of that year the king sent three ships to find the source of the spice. One came back after a month with "
    "a broken mast, one after two years with pepper and half its crew, and the third is still shown on old maps, drawn by "
    "people who waited for it, a finger's width from the edge of the world.",
    "The new tram line will connect the university with the harbour in seventeen minutes. Construction begins in March and "
    "is expected to take four years. Shops along the route fear for their customers, the cycling club asks for wider lanes, "
    "and the archaeologists have asked everybody to dig slowly, since the line crosses a Roman cemetery.",
    "A database transaction either happens as a whole or not at all. Suppose that money moves from one account to another "
    "and the power fails between the two steps: without transactions the money would be gone from the first account and "
    "would never reach the second. The log on disk, written before anything else, is what allows the system to finish the "
    "work or to undo it when the lights come back on.",
    "Whooping cranes learn their route from their parents, and when the last wild flock had shrunk to fifteen birds there "
    "were too few parents left to teach it. So biologists dressed in white, raised the chicks with puppets, and led them "
    "south behind a very slow aeroplane. The birds followed it over seven states. In the following spring, to the relief of "
    "everybody involved, they came home without any help, and without the puppets.",
    "Question: my sourdough rises well but collapses in the oven. I feed the starter twice a day, use strong flour, and "
    "proof the loaf overnight in the refrigerator. Answer: it is probably proofed for too long. Press the dough with a wet "
    "finger; if the dent stays, the dough has used up its strength. Shorten the first rise by an hour, shape the loaf more "
    "tightly, and bake it straight from the cold. If the crumb is still dense near the bottom, your stone is not hot enough: "
    "give it forty-five minutes at full heat before the bread goes in.",
    "The defendant, a clockmaker aged sixty-one, was accused of having slowed the town hall clock by six minutes so that the "
    "mayor would miss the train to the capital, where a vote on the closing of the market was to be held. He admitted the "
    "six minutes and denied the intention. The clock, he said, had been cleaned, and a clean clock needs a few days to find "
    "its pace again. Asked why he had stood on the platform at that hour with a newspaper, he answered that he liked to see "
    "trains leave on time. The court fined him the price of one ticket, second class, and the market is held to this day.",
    "Quarterly results: revenue rose by six percent to 412 million, driven by strong demand for pumps and valves in Asia, "
    "while sales of heating systems in Europe fell by a tenth. Operating profit was flat at 38 million owing to higher steel "
    "prices and the cost of moving the foundry. The board proposes a dividend of 1.20 per share, unchanged from last year. "
    "For the coming quarter the company expects a similar level of orders, with risks from exchange rates and from a strike "
    "at two of its suppliers. The chief financial officer will leave in the autumn; a successor has been found within the "
    "company and will be named at the annual meeting. Analysts had expected somewhat more, and the share lost two percent.",
    "The human ear turns pressure into electricity in three steps. Sound moves the eardrum, the drum moves three small bones, "
    "and the last of these pushes on the fluid of the inner ear, which is coiled like the shell of a snail. A membrane runs "
    "along the coil, stiff and narrow at one end, wide and slack at the other, so that every pitch shakes a place of its "
    "own: high notes near the entrance, low notes deep inside. On the membrane sit rows of cells with fine hairs, and when "
    "these bend, tiny channels open and the cell fires. We are born with about fifteen thousand such cells in each ear, and "
    "not one of them grows back. Loud music does not wear out the ear as walking wears out a shoe; it is more like stepping "
    "on a lawn until there is a path, and then wondering where the grass has gone.",
    "Dear Sir or Madam, I am writing about the flat on the corner of Mill Street which you advertised on Thursday. We are a "
    "family of four, with a quiet dog and a piano that is played between five and six. My wife teaches geography at the "
    "secondary school, and I repair instruments, mostly accordions, in a workshop outside the town, so there would be no "
    "noise from work. We could move in on the first of September or, if the present tenants leave earlier, in the middle of "
    "August. Would it be possible to see the rooms at the weekend? We would also like to ask whether the cellar is dry, "
    "whether bicycles may stand in the yard, and who looks after the cherry tree. With kind regards, and with two letters "
    "of recommendation attached, one of them from our present landlady, who is sorry to see us go, and sorrier about the dog.",
)
