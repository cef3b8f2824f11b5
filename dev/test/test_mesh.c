// test_mesh.c: coordinates are a bijection, groups partition the ranks and agree with the definition, impossible sizes are refused.
#include "llmc/mesh.h"
#include "dev/test/test.h"

// The definition, rank by rank: do a and b share the group?
static bool together(const Mesh *m, MeshGroup group, MeshAt a, MeshAt b) {
    const bool tp = a.tp == b.tp, cp = a.cp == b.cp, pp = a.pp == b.pp, dp = a.dp == b.dp;
    const int i = a.cp + m->cp * a.dp, j = b.cp + m->cp * b.dp;
    switch (group) {
    case MESH_TP: return cp && pp && dp;
    case MESH_CP: return tp && pp && dp;
    case MESH_PP: return tp && cp && dp;
    case MESH_DP: return tp && cp && pp;
    case MESH_DP_CP: return tp && pp;
    case MESH_TP_PP: return cp && dp;
    case MESH_EP: return tp && pp && i / m->ep == j / m->ep;
    case MESH_EXPERT_DP: return tp && pp && i % m->ep == j % m->ep;
    case MESH_EMBEDDING: return tp && cp && dp && (a.pp == 0 || a.pp == m->pp - 1) && (b.pp == 0 || b.pp == m->pp - 1);
    default: return true;
    }
}

static Mesh make(int world, int rank, int tp, int cp, int pp, int ep) {
    Mesh mesh = {0};
    Error error = {0};
    check(mesh_create(world, rank, tp, cp, pp, ep, &mesh, &error), "world %d, tp %d, cp %d, pp %d, ep %d: %s", world, tp, cp, pp, ep, error.text);
    return mesh;
}

// Every rank once; neighbours differ in the innermost axis.
static void bijection(int world, int tp, int cp, int pp) {
    const Mesh m = make(world, 0, tp, cp, pp, 1);
    bool ok = m.tp * m.cp * m.pp * m.dp == world;
    int rank = 0;
    for (int d = 0; d < m.dp; d++) {
        for (int p = 0; p < pp; p++) {
            for (int c = 0; c < cp; c++) {
                for (int t = 0; t < tp; t++, rank++) {
                    const MeshAt at = mesh_at(&m, rank);
                    ok = ok && mesh_rank(&m, (MeshAt){t, c, p, d}) == rank && at.tp == t && at.cp == c && at.pp == p && at.dp == d;
                }
            }
        }
    }
    check(ok && rank == world, "bijection of world %d, tp %d, cp %d, pp %d", world, tp, cp, pp);
}

static void groups_of(int world, int rank, int tp, int cp, int pp, int ep, int *members) {
    const Mesh m = make(world, rank, tp, cp, pp, ep);
    for (int g = 0; g < MESH_GROUPS; g++) {
        const int count = mesh_members(&m, (MeshGroup)g, members);
        bool ok = count == mesh_members(&m, (MeshGroup)g, NULL);
        int next = 0;
        for (int r = 0; r < world && ok; r++) {
            if (!together(&m, (MeshGroup)g, m.at, mesh_at(&m, r))) continue;
            ok = next < count && members[next++] == r;
        }
        check(ok && next == count, "group %s of rank %d in world %d, tp %d, cp %d, pp %d, ep %d", mesh_group_names[g], rank, world, tp, cp, pp, ep);
    }
}

static void refused(int world, int rank, int tp, int cp, int pp, int ep, const char *wanted) {
    Mesh mesh;
    Error error = {0};
    const bool created = mesh_create(world, rank, tp, cp, pp, ep, &mesh, &error);
    check(!created && error.code == CODE_USAGE && strstr(error.text, wanted) != NULL, "world %d, tp %d, cp %d, pp %d, ep %d: got '%s', wanted '%s'",
          world, tp, cp, pp, ep, error.text, wanted);
}

int main(void) {
    int layouts = 0, *members = base_new(16384, sizeof *members);
    const int worlds[] = {1, 2, 3, 4, 6, 8, 12, 24, 30, 64, 96, 1000, 1024, 4096, 16384};
    for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; w++) {
        const int world = worlds[w];
        for (int tp = 1; tp <= world && tp <= 16; tp++) {
            for (int cp = 1; tp * cp <= world && cp <= 16; cp++) {
                for (int pp = 1; tp * cp * pp <= world && pp <= 128; pp++) {
                    if (world % (tp * cp * pp) != 0) continue;
                    layouts++;
                    bijection(world, tp, cp, pp);
                    if (world <= 64) {
                        for (int ep = 1; ep <= world / (tp * pp); ep++) {
                            if (world / (tp * pp) % ep != 0) continue;
                            for (int rank = 0; rank < world; rank++) groups_of(world, rank, tp, cp, pp, ep, members);
                        }
                    } else {
                        groups_of(world, (int)((int64_t)layouts * 7919 % world), tp, cp, pp, 1, members);
                    }
                }
            }
        }
    }
    printf("mesh: %d layouts of up to 16384 ranks are bijections; groups agree with their definition\n", layouts);

    refused(8, 0, 3, 1, 1, 1, "--tp 3: does not divide the number of ranks, 8");
    refused(8, 0, 1, 5, 1, 1, "--cp 5: does not divide the number of ranks, 8");
    refused(8, 0, 1, 1, 16, 1, "--pp 16: more than the number of ranks, 8");
    refused(8, 0, 4, 4, 1, 1, "--tp 4 x --cp 4 x --pp 1 = 16: does not divide the number of ranks, 8");
    refused(12, 0, 4, 1, 6, 1, "--tp 4 x --cp 1 x --pp 6 = 24");
    refused(16, 0, 2, 2, 2, 3, "--ep 3: does not divide dp x cp = 2 x 2 = 4");
    refused(16, 0, 2, 1, 1, 16, "--ep 16: does not divide dp x cp = 8 x 1 = 8");
    refused(8, 0, 0, 1, 1, 1, "--tp 0: wanted 1 or more");
    refused(8, 0, 1, -2, 1, 1, "--cp -2: wanted 1 or more");
    refused(8, 0, 1, 1, 1, 0, "--ep 0: wanted 1 or more");
    refused(1 << 20, 0, 1 << 20, 1 << 20, 1 << 20, 1, "does not divide");
    refused(0, 0, 1, 1, 1, 1, "0 ranks");
    refused(4, 4, 1, 1, 1, 1, "rank 4");
    printf("mesh: impossible sizes are refused by name\n");
    free(members);
    return test_end();
}
