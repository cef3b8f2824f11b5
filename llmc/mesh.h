// mesh.h: rank <-> (tp, cp, pp, dp) coordinates and the members of every group a rank belongs to. Pure arithmetic: it makes no
// communicators (comm.h does, from the members) and knows no model: whether heads divide by tp is checked where heads are known.
//
// Order, innermost first: tp, cp, pp, dp: neighbouring ranks, which share a host, share the axes that talk most. dp is what the
// others leave: world / (tp*cp*pp). Gradients are reduced over dp x cp. ep cuts that same dp x cp into runs of ep neighbours:
// expert j lives on member j of its run, and the same member of every run holds a replica of it.
#ifndef LLMC_MESH_H
#define LLMC_MESH_H

#include "llmc/base.h" // Error, fail

enum { MESH_RANKS_MAX = 1 << 20 };

typedef struct {
    int tp, cp, pp, dp; // from 0
} MeshAt;

typedef struct {
    int world, rank;
    int tp, cp, pp, dp, ep; // sizes
    MeshAt at;              // of this rank
} Mesh;

typedef enum {
    MESH_TP,
    MESH_CP,
    MESH_PP,
    MESH_DP,
    MESH_DP_CP,     // gradients, ZeRO shards
    MESH_TP_PP,     // a whole replica of the model: gradient norm
    MESH_EP,        // tokens go to experts
    MESH_EXPERT_DP, // replicas of an expert
    MESH_EMBEDDING, // first and last pipeline stage: the two copies of a tied embedding. Ranks between them have none
    MESH_WORLD,
    MESH_GROUPS
} MeshGroup;

static const char *const mesh_group_names[MESH_GROUPS] = {"tp", "cp", "pp", "dp", "dp_cp", "tp_pp", "ep", "expert_dp", "embedding", "world"};

static inline int mesh_rank(const Mesh *mesh, MeshAt at) { return at.tp + mesh->tp * (at.cp + mesh->cp * (at.pp + mesh->pp * at.dp)); }

static inline MeshAt mesh_at(const Mesh *mesh, int rank) {
    MeshAt at;
    at.tp = rank % mesh->tp, rank /= mesh->tp;
    at.cp = rank % mesh->cp, rank /= mesh->cp;
    at.pp = rank % mesh->pp, rank /= mesh->pp;
    at.dp = rank;
    return at;
}

static inline bool mesh_create(int world, int rank, int tp, int cp, int pp, int ep, Mesh *mesh, Error *error) {
    const struct {
        const char *flag;
        int size;
    } axes[] = {{"--tp", tp}, {"--cp", cp}, {"--pp", pp}, {"--ep", ep}};
    if (world < 1 || world > MESH_RANKS_MAX) return fail(error, CODE_USAGE, "mesh: %d ranks, wanted 1 to %d", world, MESH_RANKS_MAX);
    if (rank < 0 || rank >= world) return fail(error, CODE_USAGE, "mesh: rank %d, wanted 0 to %d", rank, world - 1);
    for (size_t i = 0; i < sizeof axes / sizeof axes[0]; i++) {
        if (axes[i].size < 1) return fail(error, CODE_USAGE, "%s %d: wanted 1 or more", axes[i].flag, axes[i].size);
        if (axes[i].size > world) {
            return fail(error, CODE_USAGE, "%s %d: more than the number of ranks, %d (start more with mpirun -np)", axes[i].flag, axes[i].size,
                        world);
        }
        if (i < 3 && world % axes[i].size != 0) {
            return fail(error, CODE_USAGE, "%s %d: does not divide the number of ranks, %d", axes[i].flag, axes[i].size, world);
        }
    }
    const int64_t replica = (int64_t)tp * cp * pp; // each factor is at most 2^20
    if (replica > world || world % replica != 0) {
        return fail(error, CODE_USAGE, "--tp %d x --cp %d x --pp %d = %lld: does not divide the number of ranks, %d", tp, cp, pp,
                    (long long)replica, world);
    }
    const int dp = (int)(world / replica);
    if (dp * cp % ep != 0) return fail(error, CODE_USAGE, "--ep %d: does not divide dp x cp = %d x %d = %d", ep, dp, cp, dp * cp);
    *mesh = (Mesh){.world = world, .rank = rank, .tp = tp, .cp = cp, .pp = pp, .dp = dp, .ep = ep};
    mesh->at = mesh_at(mesh, rank);
    return true;
}

// Members of the group that holds this rank, ascending, into members (NULL: only counts them; room for mesh->world is always enough).
// Returns how many; 0 when this rank is in no such group (MESH_EMBEDDING between the first and last stage).
static inline int mesh_members(const Mesh *mesh, MeshGroup group, int *members) {
    const MeshAt me = mesh->at;
    const bool world = group == MESH_WORLD, experts = group == MESH_EP || group == MESH_EXPERT_DP;
    const bool tp = world || group == MESH_TP || group == MESH_TP_PP, pp = world || group == MESH_PP || group == MESH_TP_PP;
    const bool cp = world || group == MESH_CP || group == MESH_DP_CP || experts, dp = world || group == MESH_DP || group == MESH_DP_CP || experts;
    const int last = mesh->pp - 1, mine = me.cp + mesh->cp * me.dp; // place in dp x cp
    if (group == MESH_EMBEDDING && me.pp != 0 && me.pp != last) return 0;
    int count = 0;
    for (int d = dp ? 0 : me.dp; d < (dp ? mesh->dp : me.dp + 1); d++) {
        for (int p = pp || group == MESH_EMBEDDING ? 0 : me.pp; p < (pp || group == MESH_EMBEDDING ? mesh->pp : me.pp + 1); p++) {
            if (group == MESH_EMBEDDING && p != 0 && p != last) continue;
            for (int c = cp ? 0 : me.cp; c < (cp ? mesh->cp : me.cp + 1); c++) {
                const int place = c + mesh->cp * d;
                if (group == MESH_EP && place / mesh->ep != mine / mesh->ep) continue;
                if (group == MESH_EXPERT_DP && place % mesh->ep != mine % mesh->ep) continue;
                for (int t = tp ? 0 : me.tp; t < (tp ? mesh->tp : me.tp + 1); t++) {
                    if (members != NULL) members[count] = mesh_rank(mesh, (MeshAt){t, c, p, d});
                    count++;
                }
            }
        }
    }
    return count;
}

#endif
