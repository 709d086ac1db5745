"""The demo's text: one batch of topical pairs, and other sentences that calibrate the activation scales."""

from __future__ import annotations

#: Consecutive sentences share a topic, so that each has a meaningful nearest neighbour within the batch.
SENTENCES = (
    "The cat is sleeping on the warm sofa.",
    "A kitten naps on a cosy couch.",
    "Heavy rain flooded the streets of the city last night.",
    "A storm left many roads in town under water.",
    "The central bank raised interest rates by half a percent.",
    "Monetary policy was tightened to fight inflation.",
    "She scored the winning goal in the final minute.",
    "The striker's late shot decided the football match.",
    "Bake the bread until its crust is golden.",
    "Knead the dough and let it rise overnight.",
    "The telescope captured images of a distant galaxy.",
    "Astronomers photographed stars billions of light years away.",
    "The new graphics card doubles the speed of matrix multiplication.",
    "This processor runs deep learning workloads much faster.",
    "The orchestra played a symphony by Beethoven.",
    "A pianist performed classical music in the concert hall.",
)

#: Text that sets the activation scales; none of it is in the batch.
CALIBRATION = (
    "A dog barked at the mail carrier every single morning.",
    "Negotiations over the trade agreement ended without a result.",
    "The recipe calls for two cups of flour, sugar, and butter.",
    "Researchers published a study on sleep and memory in 2021.",
    "He forgot his umbrella on the train to Vienna.",
    "Our hotel room had a view of the mountains and the lake.",
    "Please restart the server after installing the update!",
    "The museum's oldest painting was restored last spring.",
)
