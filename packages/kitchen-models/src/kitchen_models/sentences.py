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
